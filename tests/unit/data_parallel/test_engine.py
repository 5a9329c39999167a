"""The engine over ranks that are threads: values, flags, order, errors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.buckets import Bucket, Parameter, make_buckets
from commlib.group.overlap import overlap_pays
from tests.bodies import loopback

from .fake import FakeComm, FakePlan, FakeWorld

SPECS = [Parameter(name, count, "float64", 8) for name, count in [("a", 5), ("b", 3), ("c", 9)]]
TINY = 64 / 2**20


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("early", [0, 1, 3])
def test_slots_hold_the_mean(size: int, early: int) -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        assert len(engine.buckets) == 3
        for _ in range(2):
            for parameter, spec in enumerate(SPECS):
                engine.slot(parameter)[:] = np.arange(spec.count) + comm.rank + parameter
            for bucket in range(early):
                engine.launch(bucket)
            engine.finish(range(early, 3))
            for parameter, spec in enumerate(SPECS):
                np.testing.assert_array_equal(
                    engine.slot(parameter), np.arange(spec.count) + (size - 1) / 2 + parameter
                )
                assert engine.used(parameter)
        assert not engine.in_flight
        assert engine.statistics.reductions == 2
        assert engine.statistics.early_launches == 2 * early
        assert engine.statistics.nbytes == 2 * sum(bucket.nbytes for bucket in engine.buckets)
        assert engine.statistics.exposed_seconds > 0

    FakeWorld(size).run(rank)


@pytest.mark.parametrize("cached_bytes", [0, 1 << 20])
def test_write_copies_into_the_slot_by_every_method(cached_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlib.data_parallel.bucket_reducer.CACHED_BYTES", cached_bytes)

    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        for parameter, spec in enumerate(SPECS):
            gradient = np.arange(spec.count) + 10.0 * parameter + comm.rank
            engine.write(parameter, gradient.ctypes.data)
        for parameter, spec in enumerate(SPECS):
            assert engine.slot(parameter).tolist() == [10.0 * parameter + comm.rank + i for i in range(spec.count)]
        engine.finish(range(3))
        assert engine.slot(1).tolist() == [10.5, 11.5, 12.5]

    FakeWorld(2).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_unused_parameters_count_as_zeros_and_flags_show_users(size: int) -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS))
        for parameter in range(3):
            engine.slot(parameter)[:] = 6.0
        # a on every rank, b on the last rank, c on none
        unused = {2} if comm.rank == size - 1 else {1, 2}
        engine.finish(range(1), unused)
        assert [engine.used(parameter) for parameter in range(3)] == [True, True, False]
        assert set(engine.slot(0)) == {6.0}
        assert set(engine.slot(1)) == {6.0 / size}
        assert set(engine.slot(2)) == {0.0}
        engine.finish(range(1))  # flags are cleared
        assert all(engine.used(parameter) for parameter in range(3))

    FakeWorld(size).run(rank)


def test_one_rank_reduces_nothing() -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS))
        engine.launch(0)
        engine.finish(range(0))
        assert comm.log == []

    FakeWorld(1).run(rank)


def test_without_early_launches_there_is_no_other_thread() -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        engine.finish(range(3))
        assert [how for how, _ in comm.log] == ["inline"] * 3
        comm.log.clear()
        engine.launch(0)
        engine.finish(range(1, 3))
        assert [how for how, _ in comm.log] == ["thread"] * 3
        assert [size for _, size in comm.log] == [bucket.count for bucket in engine.buckets]

    FakeWorld(2).run(rank)


def test_a_failed_reduction_is_raised_and_leaves_nothing_in_flight() -> None:
    def rank(comm: FakeComm) -> None:
        # Rank 1's buckets have other sizes: the fake communicator refuses to add them.
        specs = SPECS if comm.rank == 0 else [Parameter("a", 50, "float64", 8), *SPECS[1:]]
        engine = BucketReducer(comm, make_buckets(specs, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        engine.launch(0)
        with pytest.raises(RuntimeError, match="different buckets"):
            engine.finish(range(1, 3))
        assert not engine.in_flight

    FakeWorld(2).run(rank)


def test_buckets_can_be_summed() -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets([Parameter("a", 2, "float32", 4, "sum")]))
        engine.slot(0)[:] = 1.5
        engine.finish(range(1))
        assert engine.slot(0).tolist() == [4.5, 4.5]
        assert engine.slot(0).dtype == np.float32

    FakeWorld(3).run(rank)


@pytest.mark.parametrize(
    ("on_node", "threads", "cores", "overlap"),
    [(4, 1, 1, False), (2, 1, 1, True), (1, 1, 1, True), (4, 2, 2, False), (4, 1, 2, True)],
)
def test_overlap_pays_across_nodes_and_with_spare_cores(on_node: int, threads: int, cores: int, overlap: bool) -> None:
    comm = SimpleNamespace(size=4, node=lambda: SimpleNamespace(size=on_node))
    assert overlap_pays(comm, threads=threads, cores=cores) is overlap


def split(comm: Communicator, color: int) -> Communicator:
    group = comm.split(color)
    assert group is not None
    return group


@pytest.mark.parametrize("kind", ["mapping", "function"])
def test_each_group_has_its_buckets(kind: str) -> None:
    """Buckets of several groups, in one order of launches: each is reduced over its own ranks."""
    specs = [
        Parameter("expert", 6, "float32", 4, axis="pairs"),
        Parameter("dense", 5, "float32", 4),
        Parameter("mine", 4, "float32", 4, axis="alone", scale=0.25),
    ]

    def rank(comm: Communicator) -> None:
        groups = {"": comm, "pairs": split(comm, comm.rank // 2), "alone": split(comm, comm.rank)}
        engine = BucketReducer(groups if kind == "mapping" else groups.__getitem__, make_buckets(specs))
        assert [bucket.axis for bucket in engine.buckets] == ["alone", "", "pairs"]
        assert [plan is None for plan in engine.plans] == [True, False, comm.rank == 2]
        for early in (0, 2):
            for parameter in range(3):
                engine.slot(parameter)[:] = comm.rank
            for bucket in range(early):
                engine.launch(bucket)
            engine.finish(range(early, 3), {0} if comm.rank == 0 else ())
            pair = comm.rank // 2 * 2
            ranks = [other for other in (pair, pair + 1) if other < comm.size]
            assert set(engine.slot(0)) == {sum(ranks) / len(ranks)}
            assert set(engine.slot(1)) == {(comm.size - 1) / 2}
            assert set(engine.slot(2)) == {comm.rank / 4}

    loopback.run(3, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_the_scale_applies_to_values_and_not_to_flags(size: int) -> None:
    def rank(comm: FakeComm) -> None:
        specs = [Parameter("a", 3, "float64", 8, scale=-2.0), Parameter("b", 2, "float64", 8, scale=-2.0)]
        engine = BucketReducer(comm, make_buckets(specs))
        engine.slot(0)[:] = 1.5
        engine.finish(range(1), {1})
        assert set(engine.slot(0)) == {-3.0}
        assert engine.used(0)
        assert not engine.used(1)

    FakeWorld(size).run(rank)


class Compressed(FakePlan):
    """Reports a different number of sent bytes each time."""

    sent_bytes, uncompressed_bytes = 0, 1000

    def run(self) -> np.ndarray:
        self.sent_bytes += 7
        return super().run()


@pytest.mark.parametrize("early", [0, 1, 2])
def test_callers_can_supply_plans(early: int) -> None:
    """A function creates the plan of a bucket; its byte count is reported."""

    def rank(comm: FakeComm) -> None:
        def make(bucket: Bucket, array: Any) -> FakePlan:
            plain = bucket.parameters == (0,)
            return (FakePlan if plain else Compressed)(comm, array, "sum")

        engine = BucketReducer(comm, make_buckets(SPECS[:2], first_bucket_mib=TINY, bucket_cap_mib=TINY), make)
        for turn in (1, 2):
            for parameter in range(2):
                engine.slot(parameter)[:] = 1
            for bucket in range(early):
                engine.launch(bucket)
            engine.finish(range(early, 2))
            assert set(engine.slot(0)) == set(engine.slot(1)) == {2.0}
            nbytes = engine.buckets[1].nbytes  # over 2 ranks each sends half, twice
            assert engine.statistics.sent_bytes == turn * nbytes + sum(7 * number for number in range(1, turn + 1))
            assert engine.statistics.uncompressed_bytes == turn * (nbytes + 1000)

    FakeWorld(2).run(rank)


@pytest.mark.parametrize("size", [1, 2])
def test_a_moved_bucket_leaves_its_old_memory_unchanged(size: int) -> None:
    """Old views keep the old gradients; one rank may move a bucket that the others do not."""

    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        bucket = next(bucket.index for bucket in engine.buckets if 1 in bucket.parameters)
        home, old_views = engine.slot(1).ctypes.data, []
        for turn in range(4):
            if comm.rank == 0:
                engine.move(bucket, aside=turn < 3)
                assert engine.is_private(bucket) == (turn < 3)
            old_views.append(engine.slot(1))
            for parameter in range(3):
                engine.slot(parameter)[:] = turn + comm.rank
            engine.finish(range(3), {2} if turn == 1 else ())
            assert set(engine.slot(1)) == {turn + (size - 1) / 2}
            assert engine.used(1) and engine.used(2) == (turn != 1)
        if comm.rank == 0:
            assert [set(values) for values in old_views] == [{turn + (size - 1) / 2} for turn in range(4)]
            assert old_views[3].ctypes.data == home

    FakeWorld(size).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sent_bytes_are_counted(size: int) -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets([Parameter("a", 250, "float16", 2, native_itemsize=4)]))
        assert engine.buckets[0].nbytes == 576  # 512 for the values, 64 for the flag
        engine.finish(range(1))
        assert engine.statistics.sent_bytes == {1: 0, 2: 576, 3: 768, 4: 864}[size]
        assert engine.statistics.uncompressed_bytes == {1: 0, 2: 1076, 3: 1434, 4: 1614}[size]

    FakeWorld(size).run(rank)


def test_time_without_a_waiter_is_hidden() -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        engine.finish(range(3))
        assert engine.statistics.hidden_seconds == 0  # in this thread
        engine.launch(0)
        engine.launch(1)
        engine.finish(range(2, 3))  # the fake reports 100 s for each of three works
        assert 300 - engine.statistics.exposed_seconds <= engine.statistics.hidden_seconds <= 300

    FakeWorld(2).run(rank)


@pytest.mark.parametrize("size", [1, 3])
def test_prefetches_follow_the_reductions_and_are_awaited(size: int) -> None:
    """As for parameters that are gathered after a step: in launch order, each awaited by its first user."""

    def rank(comm: Communicator) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        arrays = [comm.empty((3000,), "float64") for _ in range(3)]
        plans = [comm.plan_all_reduce(array, "sum", out=array) for array in arrays]
        for turn in range(3):
            for number, array in enumerate(arrays):
                array[:] = number + 1
            engine.slot(0)[:] = comm.rank
            engine.launch(0)
            engine.prefetch(plans)
            if turn == 0:
                engine.fetched(1)
                assert set(arrays[1]) == {2.0 * size}
                engine.fetched(1)  # already fetched: no effect
            if turn == 1:
                engine.fetched()
                assert [array[5] for array in arrays] == [size, 2.0 * size, 3.0 * size]
            engine.finish(range(1, 3))  # waits for prefetches that nobody used
            assert [set(array) for array in arrays] == [{size}, {2.0 * size}, {3.0 * size}]
            assert set(engine.slot(0)) == {(size - 1) / 2}

    loopback.run(size, rank)


def test_a_failed_prefetch_is_raised_once() -> None:
    def rank(comm: FakeComm) -> None:
        engine = BucketReducer(comm, make_buckets(SPECS))
        odd = [FakePlan(comm, np.zeros(2 + comm.rank), "sum"), FakePlan(comm, np.ones(2), "sum")]
        engine.prefetch(odd)
        with pytest.raises(RuntimeError, match="different buckets"):
            engine.fetched(0)
        engine.fetched()
        assert odd[1].x.tolist() == [2.0, 2.0]
        engine.prefetch(odd)
        with pytest.raises(RuntimeError, match="different buckets"):
            engine.finish(range(1))
        engine.finish(range(1))

    FakeWorld(2).run(rank)
