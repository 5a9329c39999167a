"""Named operations on arrays of a late device over MPI: the same results as on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib import horovod as hvd
from commlib.collectives.device.staging_queue import StagingQueue
from commlib.errors import MismatchError, UsageError
from tests.late import LATE, LateArray

pytestmark = [pytest.mark.any_mpi, pytest.mark.any_ranks]


@pytest.fixture(autouse=True)
def started(comm: Any, no_races: None) -> None:
    hvd.init()


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("it was copied to the host")

    monkeypatch.setattr("commlib.coordinator.device_operands.fetch", refuse)


def values(seed: int, shape: tuple[int, ...] = (5, 3), dtype: str = "float32") -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * 8).astype(dtype)


def both(start: Any) -> list[list[Any]]:
    """Return the results of one operation on host arrays and on device arrays, as numpy arrays."""
    results = []
    for put in (np.copy, LATE.put):
        returned = start(put).wait()
        arrays = [returned[0]] if isinstance(returned, tuple) else returned
        assert all(isinstance(x, LateArray if put == LATE.put else np.ndarray) for x in arrays)
        # Already there, whatever this thread's stream has reached.
        fetched = [x.peek() if isinstance(x, LateArray) else x for x in arrays]
        results.append([*fetched, *(returned[1:] if isinstance(returned, tuple) else ())])
    return results


def assert_both(start: Any) -> None:
    host, late = both(start)
    assert len(host) == len(late)
    for ours, theirs in zip(late, host, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)


def test_allreduce() -> None:
    rank = hvd.rank()
    for shape in ((), (0, 2), (5, 3), (70_000,)):
        for options in ({"op": hvd.Sum}, {"op": hvd.Max}, {"op": hvd.Adasum}, {"postscale_factor": 0.5}):

            def into(put: Any, shape: Any = shape, options: Any = options) -> Any:
                return hvd.start_allreduce([put(values(rank, shape))], [put(np.zeros(shape, np.float32))], **options)

            assert_both(into)

    def in_place(put: Any) -> Any:
        several = [put(values(rank)), put(values(rank, (4,), "int32")), put(values(rank, (7,)))]
        return hvd.start_allreduce(several, several, op=hvd.Sum)

    assert_both(in_place)
    x = LATE.put(values(rank))
    (result,) = hvd.start_allreduce([x], [x]).wait()
    assert result is x


def test_movement(no_copies: None) -> None:
    """Through the group's own collectives, where nothing is scaled."""
    rank, size = hvd.rank(), hvd.size()
    assert_both(lambda put: hvd.start_allgather([put(values(rank, (rank, 3))), put(values(rank))]))
    assert_both(lambda put: hvd.start_broadcast([put(values(rank)), put(values(rank, (2,), "int64"))], size - 1))
    splits = [rank + other for other in range(size)]
    assert_both(lambda put: hvd.start_alltoall(put(values(rank, (sum(splits) + 1, 2))), splits))
    assert_both(lambda put: hvd.start_reducescatter([put(values(rank, (7, 2))), put(values(rank))], op=hvd.Sum))
    assert_both(lambda put: hvd.start_reducescatter([put(values(rank, (70_000,)))], op=hvd.Average))
    assert_both(lambda put: hvd.start_allgather([put(values(rank, (30_000 * (rank % 2), 2)))]))


def test_scaled_results() -> None:
    rank = hvd.rank()
    assert_both(lambda put: hvd.start_reducescatter([put(values(rank, (7, 2)))], op=hvd.Sum, prescale_factor=0.5))


@pytest.mark.parametrize("compression", ["int8", "powersgd:rank=2"])
def test_compressed(compression: str) -> None:
    tensors = values(hvd.rank(), (40, 50)), values(hvd.rank(), (7,), "float64")

    def start(put: Any) -> Any:
        inputs = [put(tensor) for tensor in tensors]
        name = f"{compression} {put.__name__}"
        return hvd.start_compressed_allreduce(inputs, inputs, name, compression=compression, within_node=True)

    host, late = both(start)
    for ours, theirs in zip(late, host, strict=True):  # their names differ, and so do random factors
        if compression == "int8":
            np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all() and ours.shape == theirs.shape


def test_any_order_together_with_host_operations() -> None:
    """Pending work of the device is waited for when their turn has come."""
    rank, size = hvd.rank(), hvd.size()
    pending = {}
    for number in range(12)[:: -1 if rank % 2 else 1]:
        x = np.full(50, rank + number, np.float32)
        array = LATE.put(x) if number % 3 else x
        pending[number] = hvd.start_allreduce([array], [array], f"mixed {number}", op=hvd.Sum)
    for number, work in pending.items():
        (result,) = work.wait()
        actual = result.peek() if isinstance(result, LateArray) else result
        np.testing.assert_array_equal(actual, np.full(50, size * number + sum(range(size))))


def test_joined_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank:
        x = LATE.put(np.full(9, rank, np.float32))
        (result,) = hvd.start_allreduce([x], [x], "after others have joined", op=hvd.Sum).wait()
        np.testing.assert_array_equal(result.peek(), np.full(9, sum(range(size))))
    hvd.start_join().wait()


@pytest.mark.ranks(min=2)
def test_ranks_on_different_devices_are_an_error() -> None:
    x = np.zeros(3, np.float32)
    array = LATE.put(x) if hvd.rank() else x
    with pytest.raises(MismatchError, match="device is cpu on rank 0 but late on rank"):
        hvd.start_allreduce([array], [array], "somewhere else").wait()


def test_outputs_of_the_wrong_kind_are_refused() -> None:
    on_device, on_host = LATE.put(np.zeros(3, np.float32)), np.zeros(3, np.float32)
    for inputs, outputs in (
        ([on_device], [on_host]),
        ([on_host], [on_device]),
        ([on_device, on_host], [on_device, on_host]),
    ):
        with pytest.raises(UsageError, match="arrays on one device"):
            hvd.start_allreduce(inputs, outputs, "here and there")
    with pytest.raises(UsageError, match="an output has shape"):
        hvd.start_allreduce([on_device], [LATE.put(np.zeros(4, np.float32))], "longer")
    with pytest.raises(UsageError, match="needs floats"):
        hvd.start_allreduce([LATE.put(np.zeros(3, np.int32))], [LATE.put(np.zeros(3, np.int32))], op=hvd.Adasum)


def test_a_missing_wait_is_detected(monkeypatch: Any) -> None:
    monkeypatch.setattr(StagingQueue, "wait", lambda queue, event: None)
    with LATE.careless():
        x = LATE.put(np.ones(9, np.float32))
        (result,) = hvd.start_allreduce([x], [LATE.empty(9)], op=hvd.Sum).wait()
        assert not np.array_equal(result.peek(), np.full(9, hvd.size()))


def test_all_reduces_skip_the_coordinators_copies(no_copies: None) -> None:
    """They are the group's own collectives, if nothing is scaled and no rank has joined."""
    for op, expected in ((hvd.Sum, sum(range(hvd.size()))), (hvd.Max, hvd.size() - 1)):
        arrays = [LATE.put(np.full(count, hvd.rank(), np.float32)) for count in (0, 1, 3000)]
        for result in hvd.start_allreduce(arrays, arrays, op=op).wait():
            np.testing.assert_array_equal(result.peek(), np.full(result.shape, expected))


def test_pending_work_of_other_streams_comes_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(LATE, "delay", 0.01)
    with LATE.using(LATE.stream()):
        x = LATE.put(np.full(500, hvd.rank(), np.float32))
        array = LATE.wrap(x, "a test")
    (result,) = hvd.start_allreduce([array], [array], op=hvd.Sum).wait()
    assert result is array
    np.testing.assert_array_equal(x.peek(), np.full(500, sum(range(hvd.size()))))


def test_a_missing_wait_for_resident_data_is_detected(monkeypatch: Any) -> None:
    monkeypatch.setattr("commlib.coordinator.device_execution.wait_for", lambda event, on_wait: None)
    with LATE.careless():
        x = LATE.put(np.ones(9, np.float32))
        (result,) = hvd.start_allreduce([x], [LATE.empty(9)], op=hvd.Sum).wait()
        assert not np.array_equal(result.peek(), np.full(9, hvd.size()))
    np.testing.assert_array_equal(result.peek(), np.full(9, hvd.size()))
