"""Buckets: everything in exactly one slot, nothing overlaps, caps hold, order follows backward."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.data_parallel.buckets import ALIGNMENT, Bucket, Parameter, complete_order, make_buckets

MIB = 2**20
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@st.composite
def parameters(draw: st.DrawFn) -> list[Parameter]:
    dtypes = draw(st.lists(st.sampled_from(sorted(ITEMSIZE)), max_size=30))
    return [
        Parameter(f"p{i}", draw(st.integers(0, 5000)), dtype, ITEMSIZE[dtype], draw(st.sampled_from(["mean", "sum"])))
        for i, dtype in enumerate(dtypes)
    ]


caps = st.floats(1e-5, 0.05)


@given(parameters(), caps, caps)
def test_every_element_has_one_slot(specs: list[Parameter], first: float, cap: float) -> None:
    buckets = make_buckets(specs, first_bucket_mib=first, bucket_cap_mib=cap)
    assert sorted(p for bucket in buckets for p in bucket.parameters) == list(range(len(specs)))
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        used_cells: set[int] = set()
        for slot in bucket.slots:
            spec = specs[slot.parameter]
            assert (spec.dtype, spec.reduction, spec.count) == (bucket.dtype, bucket.reduction, slot.count)
            assert slot.offset * bucket.itemsize % ALIGNMENT == 0
            cells = {*range(slot.offset, slot.offset + slot.count), slot.flag}
            assert len(cells) == slot.count + 1
            assert not cells & used_cells
            used_cells |= cells
        assert max(used_cells) < bucket.count
        assert [slot.flag for slot in bucket.slots] == list(range(bucket.flags, bucket.flags + len(bucket.slots)))


@given(parameters(), caps, caps)
def test_buckets_respect_the_caps(specs: list[Parameter], first: float, cap: float) -> None:
    seen = set()
    for bucket in make_buckets(specs, first_bucket_mib=first, bucket_cap_mib=cap):
        kind = (bucket.dtype, bucket.reduction)
        limit = min(first, cap) if kind not in seen else cap
        seen.add(kind)
        assert bucket.flags * bucket.itemsize <= int(limit * MIB) or len(bucket.slots) == 1


@given(parameters(), caps, caps)
def test_buckets_follow_the_order_of_backward(specs: list[Parameter], first: float, cap: float) -> None:
    buckets = make_buckets(specs, first_bucket_mib=first, bucket_cap_mib=cap)
    completed = [min(bucket.parameters) for bucket in buckets]
    assert completed == sorted(completed, reverse=True)
    for bucket in buckets:
        assert list(bucket.parameters) == sorted(bucket.parameters, reverse=True)


def test_first_bucket_is_small_then_full_ones() -> None:
    specs = [Parameter(f"p{i}", MIB // 8, "float32", 4) for i in range(12)]  # half a MiB each
    assert [len(b.slots) for b in make_buckets(specs, first_bucket_mib=1, bucket_cap_mib=2)] == [2, 4, 4, 2]


def test_a_parameter_larger_than_the_cap_has_a_bucket_of_its_own() -> None:
    specs = [Parameter(name, count, "float32", 4) for name, count in [("a", 10), ("big", MIB), ("z", 10)]]
    buckets = make_buckets(specs, first_bucket_mib=1, bucket_cap_mib=1)
    assert [bucket.parameters for bucket in buckets] == [(2,), (1,), (0,)]


def test_dtypes_do_not_mix_and_do_not_cut_each_other() -> None:
    specs = [Parameter(f"p{i}", 10, "float32" if i % 2 else "float64", 4 if i % 2 else 8) for i in range(6)]
    assert [bucket.parameters for bucket in make_buckets(specs)] == [(5, 3, 1), (4, 2, 0)]


def test_buckets_have_sizes_in_bytes() -> None:
    (bucket,) = make_buckets([Parameter("a", 3, "float16", 2), Parameter("b", 33, "float16", 2)])
    assert bucket == Bucket(0, "float16", 2, "mean", bucket.slots, flags=96, count=128)
    assert bucket.nbytes == 256


@pytest.mark.parametrize("caps", [(0, 1), (1, 0), (-1, 1)])
def test_caps_must_be_positive(caps: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        make_buckets([], first_bucket_mib=caps[0], bucket_cap_mib=caps[1])


@given(st.data(), caps, caps)
def test_buckets_follow_the_order_of_readiness(data: st.DataObject, first: float, cap: float) -> None:
    """Buckets are filled, and complete, in the order in which gradients become ready."""
    specs = data.draw(parameters())
    order = data.draw(st.permutations(range(len(specs))))
    buckets = make_buckets(specs, order=order, first_bucket_mib=first, bucket_cap_mib=cap)
    assert sorted(p for bucket in buckets for p in bucket.parameters) == list(range(len(specs)))
    places = [[order.index(parameter) for parameter in bucket.parameters] for bucket in buckets]
    assert all(place == sorted(place) for place in places)
    completed = [place[-1] for place in places]
    assert completed == sorted(completed)


def test_by_default_gradients_become_ready_in_reverse() -> None:
    specs = [Parameter(f"p{i}", 40, "float32", 4) for i in range(6)]
    options: Any = {"first_bucket_mib": 2e-4, "bucket_cap_mib": 4e-4}
    assert make_buckets(specs, **options) == make_buckets(specs, order=[5, 4, 3, 2, 1, 0], **options)


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [0, 1, 2]])
def test_an_order_names_every_parameter_once(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of 2 parameters once"):
        make_buckets([Parameter("a", 1, "float32", 4), Parameter("b", 1, "float32", 4)], order=order)


def test_unready_parameters_come_last_in_reverse() -> None:
    assert complete_order([2, 0], 5) == [2, 0, 4, 3, 1]
    assert complete_order([], 3) == [2, 1, 0]
    assert complete_order([1, 7, 0], 2) == [1, 0]  # 7 is a flag


def test_kinds_do_not_mix_and_buckets_name_their_kind() -> None:
    """Devices, groups and scales are as good a reason for a bucket of its own as a dtype."""
    kinds = [("cpu", "", 1.0), ("cuda", "", 1.0), ("cpu", "experts", 1.0), ("cpu", "experts", 0.5)]
    specs = [
        Parameter(f"p{i}", 10, "float32", 4, device=device, axis=group, scale=scale)
        for i, (device, group, scale) in enumerate(kinds * 2)
    ]
    buckets = make_buckets(specs)
    assert [bucket.parameters for bucket in buckets] == [(7, 3), (6, 2), (5, 1), (4, 0)]
    assert [(bucket.device, bucket.axis, bucket.scale) for bucket in buckets] == kinds[::-1]


def test_bytes_saved_by_casting_are_counted() -> None:
    specs = [Parameter("cast", 10, "float16", 2, native_itemsize=4), Parameter("as it is", 7, "float16", 2)]
    (bucket,) = make_buckets(specs)
    assert bucket.saved_nbytes == 20
