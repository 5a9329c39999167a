"""Top-k and random-k: the chosen elements, the payload, and the residual."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.codec import Codec
from commlib.compress.codecs.sparse import RandomK, TopK
from commlib.errors import UsageError
from commlib.kernels.host import sparse
from commlib.kernels.host.select import keep_largest

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FULL_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]  # to round it as a number would make it -0
SIZES = st.one_of(st.integers(0, 200), st.sampled_from([1023, 2047, 2048, 2049, 5000, 9999]))
RATIOS = st.sampled_from([1e-4, 0.01, 0.03, 0.25, 0.5, 1.0])
KINDS = st.sampled_from(["normal", "few values", "zeros", "denormal", "huge", "rising", "falling", "mostly zero"])


def values_of(kind: str, count: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    normal = random.standard_normal(count, np.float32)
    with np.errstate(over="ignore"):
        return {
            "normal": normal,
            "few values": random.integers(-2, 3, count).astype(np.float32),
            "zeros": np.zeros(count, np.float32),
            "denormal": normal * np.float32(1e-40),
            "huge": np.clip(normal * np.float32(1e38), -3.4e38, 3.4e38),
            "rising": np.arange(count, dtype=np.float32),
            "falling": -np.arange(count, 0, -1, dtype=np.float32),
            "mostly zero": normal * (random.random(count) < 0.002),
        }[kind].astype(np.float32)


def largest(y: Any, k: int) -> Any:
    """Return the elements that top-k keeps, by sorting magnitudes as integers: NaN above infinity, equals in order."""
    magnitude = y.view(np.uint32) & 0x7FFFFFFF
    order = np.lexsort((np.arange(len(y)), -magnitude.astype(np.int64)))[:k]
    if len(order) and magnitude[order[0]] >= 0x7F800000:
        order = order[magnitude[order] >= 0x7F800000]
    largest_values = np.zeros_like(y)
    largest_values[order] = y[order]
    return largest_values


def through(codec: Codec, x: Any, *, residual: Any = None, seed: int = 0) -> Any:
    """Return the decoded values. The payload is longer than needed, and the bytes behind it must not change."""
    memory = np.full(codec.payload_bytes(len(x)) + 12, 171, np.uint8)
    payload = memory[3:-9]  # anywhere in memory
    used = codec.encode(x, payload, seed=seed, residual=residual)
    assert used <= len(payload) and (memory[:3] == 171).all() and (memory[-9:] == 171).all()
    payload[used:] = 255
    out = np.full(len(x), 7, np.float32)
    codec.decode(payload, out)
    twice = np.ones(len(x), np.float32)
    codec.decode(payload[:used], twice, add=True)
    np.testing.assert_array_equal(twice, out + np.float32(1))
    return out


@settings(max_examples=80, deadline=None)
@given(count=SIZES, ratio=RATIOS, kind=KINDS, seed=st.integers(0, 99))
def test_the_largest_arrive_unchanged(count, ratio, kind, seed):
    codec, x = TopK(ratio), values_of(kind, count, seed)
    assert codec.sent(count) == min(count, max(1, round(ratio * count)))
    np.testing.assert_array_equal(through(codec, x), largest(x, codec.sent(count)))


@settings(max_examples=80, deadline=None)
@given(count=SIZES, ratio=RATIOS, kind=KINDS, seed=st.integers(0, 99), values=st.sampled_from(list(DTYPES)))
def test_the_residual_keeps_unsent_elements(count, ratio, kind, seed, values):
    """Exactly, for halves too: the rounding error of a float32 has no more bits than the float32."""
    codec, x = TopK(ratio, values), values_of(kind, count, seed)
    before = values_of("normal", count, seed + 1)
    in_place, after = before.copy(), np.full(count, np.nan, np.float32)
    y = x + before
    arrived = through(codec, x, residual=(before, after))
    with np.errstate(over="ignore"):
        expected = largest(y, codec.sent(count)).astype(DTYPES[values]).astype(np.float32)
    np.testing.assert_array_equal(arrived, expected)
    # What overflows half precision arrives as infinite, and all of it is left.
    finite = np.isfinite(arrived)
    np.testing.assert_array_equal(np.where(finite, arrived, 0).astype(np.float64) + after, y)
    np.testing.assert_array_equal(through(codec, x, residual=(in_place, in_place)), arrived)
    np.testing.assert_array_equal(in_place, after)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 5000),
    bad=st.lists(st.sampled_from([np.inf, -np.inf, np.nan, FULL_NAN]), min_size=1, max_size=9),
    ratio=RATIOS, seed=st.integers(0, 99), same=st.booleans(), values=st.sampled_from(list(DTYPES)),
)  # fmt: skip
def test_nonfinite_elements_arrive_alone_and_keep_their_residual(count, bad, ratio, seed, same, values):
    random = np.random.default_rng(seed)
    codec, x = TopK(ratio, values), random.standard_normal(count, np.float32)
    x[random.integers(0, count, len(bad))] = bad
    before = random.standard_normal(count, np.float32)
    after = before.copy() if same else np.empty_like(before)
    y = x + before
    arrived = through(codec, x, residual=(after if same else before, after))
    np.testing.assert_array_equal(arrived, largest(y, codec.sent(count)))
    assert not np.isfinite(arrived).all()
    np.testing.assert_array_equal(after, np.where(np.isfinite(y), y, before))


@pytest.mark.parametrize("ratio", [0.001, 0.3])
def test_ascending_input_is_selected(ratio):
    """Then every element is a candidate, and candidates are discarded repeatedly."""
    x = np.arange(1, 40001, dtype=np.float32)
    np.testing.assert_array_equal(through(TopK(ratio), x), largest(x, TopK(ratio).sent(len(x))))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_largest_candidates_are_kept(data):
    bits = data.draw(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 5), min_size=2, max_size=60))
    k = data.draw(st.integers(1, len(bits) - 1))
    indices, values_kept = np.arange(len(bits), dtype=np.uint32), np.array(bits, np.uint32)
    smallest = keep_largest(indices, values_kept, len(bits), k)
    order = sorted(range(len(bits)), key=lambda i: (-(bits[i] & 0x7FFFFFFF), i))[:k]
    assert indices[:k].tolist() == sorted(order)
    assert values_kept[:k].tolist() == [bits[i] for i in sorted(order)]
    assert smallest == bits[order[-1]] & 0x7FFFFFFF


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(
        st.one_of(st.integers(0, 300), st.sampled_from([254, 255, 256, 509, 510, 65534, 65535, 65536, 200000])),
        max_size=30,
    ),
    kind=st.sampled_from([sparse.FLOAT32, sparse.FLOAT16, sparse.BFLOAT16]),
)
def test_gaps_of_any_length_survive(gaps, kind):
    indices = (np.cumsum(np.array(gaps, np.int64) + 1) - 1).astype(np.uint32)
    count = int(indices[-1]) + 1 if gaps else 0
    values = np.arange(1, len(gaps) + 1, dtype=np.float32)  # small whole numbers: exact in every dtype
    payload = np.zeros(sparse.max_bytes(count, len(gaps), kind), np.uint8)
    used = sparse.write(indices, values.view(np.uint32), len(gaps), kind, payload.ctypes.data)
    narrow, wide = (width * sum(gap // (256**width - 1) + 1 for gap in gaps) for width in (1, 2))
    assert used == sparse.HEADER + len(gaps) * (4 if kind == sparse.FLOAT32 else 2) + min(narrow, wide)
    out = np.zeros(count, np.float32)
    assert sparse.read(payload.ctypes.data, used, kind, out.ctypes.data, count, False) == 0
    expected = np.zeros(count, np.float32)
    expected[indices] = values
    np.testing.assert_array_equal(out, expected)


def test_a_place_takes_about_a_byte():
    """At 1 % the mean gap is 99, and 1 + q / (1 - q) bytes are expected with q = 0.99^255 = 0.077: 1.08."""
    x = np.random.default_rng(0).standard_normal(100_000, np.float32)
    codec = TopK(0.01)
    used = codec.encode(x, np.empty(codec.payload_bytes(len(x)), np.uint8))
    assert 5000 + sparse.HEADER <= used <= 5150  # 4 bytes of each value; 1000 places have a spread of about 10


@settings(max_examples=60, deadline=None)
@given(count=SIZES, ratio=RATIOS, seed=st.integers(-(2**63), 2**63 - 1))
def test_random_places_differ_and_are_the_same_for_one_seed(count, ratio, seed):
    codec = RandomK(ratio)
    places = codec.choose(count, seed)
    assert len(places) == codec.sent(count)
    assert (np.diff(places.astype(np.int64)) > 0).all() and (places < count).all()
    np.testing.assert_array_equal(codec.choose(count, seed), places)
    x = np.arange(1, count + 1, dtype=np.float32)
    expected = np.zeros_like(x)
    expected[places] = x[places]
    np.testing.assert_array_equal(through(codec, x, seed=seed), expected)


@pytest.mark.parametrize(("count", "ratio"), [(10, 0.3), (7, 0.5), (64, 0.1)])
def test_every_element_has_the_same_chance(count, ratio):
    codec, draws = RandomK(ratio), 4000
    chosen = np.zeros(count)
    for seed in range(draws):
        chosen[codec.choose(count, seed)] += 1
    chance = codec.sent(count) / count
    # 5 standard deviations of a binomial count; seeds are fixed, so this passes always or never.
    assert np.abs(chosen - draws * chance).max() < 5 * np.sqrt(draws * chance * (1 - chance))


def test_unbiased_random_values_are_scaled():
    x = np.arange(1, 101, dtype=np.float32)
    codec = RandomK(0.25, unbiased=True)
    places = codec.choose(100, 3)
    expected = np.zeros_like(x)
    expected[places] = 4 * x[places]
    np.testing.assert_array_equal(through(codec, x, seed=3), expected)
    assert not codec.feedback and RandomK(0.25).feedback


@settings(max_examples=40, deadline=None)
@given(count=SIZES, ratio=RATIOS, seed=st.integers(0, 99), same=st.booleans())
def test_the_residual_keeps_elements_not_drawn(count, ratio, seed, same):
    x, before = values_of("normal", count, seed), values_of("normal", count, seed + 1)
    y, after = x + before, before.copy() if same else np.empty_like(before)
    arrived = through(RandomK(ratio), x, seed=seed, residual=(after if same else before, after))
    np.testing.assert_array_equal(arrived + after, y)  # one of them is zero
    assert (after[RandomK(ratio).choose(count, seed)] == 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_nonfinite_element_makes_random_values_nonfinite(bad, feedback):
    x = np.ones(3000, np.float32)
    before, after = np.ones_like(x), np.zeros_like(x)
    codec = RandomK(0.001)
    x[(codec.choose(3000, 1)[0] + 1) % 3000] = bad  # not drawn itself
    arrived = through(codec, x, seed=1, residual=(before, after) if feedback else None)
    assert np.isnan(arrived).sum() == 3
    if feedback:
        np.testing.assert_array_equal(after, np.where(np.isfinite(x), 2, 1))


@pytest.mark.parametrize("codec", [TopK(), TopK(0.1, "float16"), RandomK(), RandomK(0.5, unbiased=True)])
def test_sparse_codecs_keep_the_contract(codec):
    assert isinstance(codec, Codec)
    assert not codec.fixed and codec.align == 1


def test_names_have_the_options():
    assert TopK().name == "topk:ratio=0.01"
    assert TopK(0.001, "bfloat16").name == "topk:ratio=0.001,values=bfloat16"
    assert RandomK(0.02).name == "randomk:ratio=0.02"
    assert RandomK(unbiased=True).name == "randomk:ratio=0.01,unbiased=true"


def test_wrong_options_are_refused():
    for ratio in (0, -1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="ratio"):
            TopK(ratio)
        with pytest.raises(UsageError, match="ratio"):
            RandomK(ratio)
    with pytest.raises(UsageError, match=r"values='int8'.*float16"):
        TopK(values="int8")


def test_payloads_that_cannot_be_decoded_are_refused():
    """They would be written to arbitrary memory."""
    x = np.ones(5000, np.float32)
    for codec in (TopK(1.0), TopK(0.0002)):
        payload = np.zeros(codec.payload_bytes(5000), np.uint8)
        used = codec.encode(x[::-1].copy(), payload)
        for length in (0, 7, 8, used - 1):
            with pytest.raises(UsageError, match=r"payload"):
                codec.decode(payload[:length], np.empty(5000, np.float32))
    x[:4999] = 0
    TopK(0.0002).encode(x, payload)
    with pytest.raises(UsageError, match="longer than 4999"):
        TopK().decode(payload, np.empty(4999, np.float32))
    with pytest.raises(UsageError, match="not written by this codec"):
        TopK(values="float16").decode(payload, np.empty(5000, np.float32))
    with pytest.raises(UsageError):
        TopK().encode(x, payload[:20])
