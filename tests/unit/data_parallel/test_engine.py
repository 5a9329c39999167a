"""The engine over ranks that are threads: values, flags, order, errors."""

from types import SimpleNamespace

import numpy as np
import pytest

from commlib.data_parallel import Engine, Parameter, make_buckets, overlap_pays

from .fake import FakeComm, FakeWorld

SPECS = [Parameter(name, count, "float64", 8) for name, count in [("a", 5), ("b", 3), ("c", 9)]]
TINY = 64 / 2**20


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("early", [0, 1, 3])
def test_mean_of_slots(size: int, early: int) -> None:
    def rank(comm: FakeComm) -> None:
        engine = Engine(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
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
def test_write_copies_into_the_slot_whichever_way(cached_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlib.data_parallel.engine._CACHED_BYTES", cached_bytes)

    def rank(comm: FakeComm) -> None:
        engine = Engine(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        for parameter, spec in enumerate(SPECS):
            gradient = np.arange(spec.count) + 10.0 * parameter + comm.rank
            engine.write(parameter, gradient.ctypes.data)
        for parameter, spec in enumerate(SPECS):
            assert engine.slot(parameter).tolist() == [10.0 * parameter + comm.rank + i for i in range(spec.count)]
        engine.finish(range(3))
        assert engine.slot(1).tolist() == [10.5, 11.5, 12.5]

    FakeWorld(2).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_unused_contributes_zeros_and_flags_tell_who_used_what(size: int) -> None:
    def rank(comm: FakeComm) -> None:
        engine = Engine(comm, make_buckets(SPECS))
        for parameter in range(3):
            engine.slot(parameter)[:] = 6.0
        # a on every rank, b on the last rank, c on none
        unused = {2} if comm.rank == size - 1 else {1, 2}
        engine.finish(range(1), unused)
        assert [engine.used(parameter) for parameter in range(3)] == [True, True, False]
        assert set(engine.slot(0)) == {6.0}
        assert set(engine.slot(1)) == {6.0 / size}
        assert set(engine.slot(2)) == {0.0}
        engine.finish(range(1))  # flags do not stick
        assert all(engine.used(parameter) for parameter in range(3))

    FakeWorld(size).run(rank)


def test_one_rank_reduces_nothing() -> None:
    def rank(comm: FakeComm) -> None:
        engine = Engine(comm, make_buckets(SPECS))
        engine.launch(0)
        engine.finish(range(0))
        assert comm.log == []

    FakeWorld(1).run(rank)


def test_nothing_launched_early_needs_no_other_thread() -> None:
    def rank(comm: FakeComm) -> None:
        engine = Engine(comm, make_buckets(SPECS, first_bucket_mib=TINY, bucket_cap_mib=TINY))
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
        engine = Engine(comm, make_buckets(specs, first_bucket_mib=TINY, bucket_cap_mib=TINY))
        engine.launch(0)
        with pytest.raises(RuntimeError, match="different buckets"):
            engine.finish(range(1, 3))
        assert not engine.in_flight

    FakeWorld(2).run(rank)


def test_sum_is_a_reduction_too() -> None:
    def rank(comm: FakeComm) -> None:
        engine = Engine(comm, make_buckets([Parameter("a", 2, "float32", 4, "sum")]))
        engine.slot(0)[:] = 1.5
        engine.finish(range(1))
        assert engine.slot(0).tolist() == [4.5, 4.5]
        assert engine.slot(0).dtype == np.float32

    FakeWorld(3).run(rank)


@pytest.mark.parametrize(
    ("on_node", "threads", "cores", "overlap"),
    [(4, 1, 1, False), (2, 1, 1, True), (1, 1, 1, True), (4, 2, 2, False), (4, 1, 2, True)],
)
def test_overlap_pays_across_nodes_and_with_cores_to_spare(
    on_node: int, threads: int, cores: int, overlap: bool
) -> None:
    comm = SimpleNamespace(size=4, node=lambda: SimpleNamespace(size=on_node))
    assert overlap_pays(comm, threads=threads, cores=cores) is overlap
