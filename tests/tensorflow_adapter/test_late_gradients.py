"""TensorFlow's gradients and operations by name on the late device: commlib's work there is late."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.communicator import Communicator
from commlib.devices.array import DeviceArray
from commlib.errors import MismatchError
from commlib_tensorflow.devices import settle
from tests.bodies.device_paths import kinds_gathered
from tests.late import LATE
from tests.tensorflow_adapter import device_gradients as bodies
from tests.tensorflow_adapter.late import HostTensors, late, watched
from tests.tensorflow_adapter.oracle import MODES, in_mode

both = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let late streams wait for those of other ranks, so that no data needs the host."""
    monkeypatch.setattr(LATE, "has_signals", True)
    monkeypatch.setattr(LATE, "delay", 1e-3)


@pytest.fixture
def group(comm: Any) -> Iterator[Communicator]:
    """A separate group of all ranks, as each group determines once whether streams can wait for other ranks."""
    ranks = comm.split(0)
    yield ranks
    ranks.close()


@pytest.fixture
def place(comm: Any) -> Iterator[HostTensors]:
    yield from watched(alone=comm.size == 1)


@both
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"overlap": True, "groups": 3},
        {"gradient_predivide_factor": 4.0},
        {"op": ct.Average, "compression": ct.Compression.none},
    ],
    ids=str,
)
def test_training_equals_one_process(comm: Any, place: HostTensors, mode: str, options: Any) -> None:
    bodies.tape(comm, mode, **options)


@both
@pytest.mark.parametrize("dtype", bodies.FLOATS)
def test_dtypes(comm: Any, place: HostTensors, mode: str, dtype: str) -> None:
    bodies.dtypes(comm, place, mode, dtype)


@both
def test_gradients_that_are_kept(comm: Any, place: HostTensors, mode: str) -> None:
    bodies.kept(comm, place, mode)


@both
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse(comm: Any, place: HostTensors, mode: str, as_dense: bool) -> None:
    bodies.sparse(comm, mode, as_dense)


def test_rows_stay_on_the_device(comm: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = kinds_gathered(monkeypatch)
    bodies.sparse(comm, "graph", as_dense=False)
    assert gathered <= {DeviceArray} and (gathered or comm.size == 1)


def test_rows_with_joined_ranks(comm: Any, place: HostTensors) -> None:
    bodies.joined_rows(comm)


def test_gradients_that_only_some_ranks_have(comm: Any, place: HostTensors) -> None:
    bodies.missing(comm, place)


@pytest.mark.parametrize("options", [{}, {"compression": "int8", "compress_within_node": True}], ids=str)
def test_ranks_that_have_joined(comm: Any, place: HostTensors, options: Any) -> None:
    bodies.joined(comm, place, **options)


@pytest.mark.parametrize("passes", [1, 2])
def test_fit(comm: Any, place: HostTensors, passes: int) -> None:
    bodies.fit(comm, passes)


@both
@pytest.mark.parametrize("compression", [ct.Compression.fp16, ct.Compression.bf16], ids=["fp16", "bf16"])
def test_compression(comm: Any, place: HostTensors, mode: str, compression: Any) -> None:
    bodies.compressed(comm, place, mode, compression)


@both
@pytest.mark.parametrize("compression", ["int8", "powersgd:rank=2"])
def test_compression_beyond_a_cast(comm: Any, place: HostTensors, mode: str, compression: str) -> None:
    on_device = bodies.compressed(comm, place, mode, compression)
    if compression == "int8":  # other codecs draw numbers, by names
        place.close()
        on_host = bodies.compressed(comm, place, mode, compression)
        place.open()
        np.testing.assert_array_equal(on_device, on_host)


@both
def test_operations_by_name(comm: Any, place: HostTensors, mode: str) -> None:
    bodies.by_name(comm, place, mode)


@pytest.mark.ranks(max=3)
def test_traced_verbs(group: Any, place: HostTensors) -> None:
    bodies.traced_verbs(group, place)


@pytest.mark.ranks(min=2)
def test_gradients_are_not_staged_in_host_memory(
    comm: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the flags of ranks do; TensorFlow uses each result where it was reduced."""
    staged: list[int] = []
    original = LATE.staging

    def staging(nbytes: int) -> Any:
        staged.append(nbytes)
        return original(nbytes)

    monkeypatch.setattr(LATE, "staging", staging)
    variables = [tf.Variable(place.put(np.ones(5000, np.float32))) for _ in range(3)]
    taken = []
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in variables])
        before = len(place.taken)
        gradients = ct.DistributedGradientTape(tape).gradient(loss, variables)
        taken.append(sorted(place.taken[before:]))
        del gradients
    assert taken[-1] == taken[-2] and len(taken[-1]) == 3
    assert staged and max(staged) < 100


@pytest.mark.ranks(min=2)
def test_slots_are_rewritten_only_after_tensorflow_has_run(
    comm: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued operations on a freed gradient may not have run yet."""
    variable, results = tf.Variable(place.put(np.ones(1000, np.float32))), []

    def there() -> Any:
        LATE.synchronise()
        values = np.empty(1000, np.float32)
        ctypes.memmove(values.ctypes.data, place.taken[-1], values.nbytes)
        return values

    def looking(where: str) -> None:
        if place.taken:
            results.append(there()[0])
        settle(where)

    monkeypatch.setattr("commlib_tensorflow._eager_call.settle", looking)
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * float(step)
        ct.DistributedGradientTape(tape).gradient(loss, variable)
    assert results == [0, 1, 2]
    assert (there() == 3).all()


@pytest.mark.ranks(min=2)
@both
def test_a_missing_wait_is_detected(comm: Any, place: HostTensors, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr("commlib_tensorflow.devices.wait_for", lambda event, on_wait: None)
    monkeypatch.setattr("commlib.coordinator.device_execution.wait_for", lambda event, on_wait: None)
    with LATE.careless(), pytest.raises(AssertionError):
        bodies.by_name(comm, place, mode)
    comm.barrier()


@pytest.mark.ranks(min=2)
@both
def test_ranks_with_tensors_on_different_devices_are_refused(comm: Any, mode: str) -> None:
    place = late() if comm.rank else None
    variable = tf.Variable([1.0, 2.0])

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        return ct.DistributedGradientTape(tape, groups=7).gradient(loss, variable)

    try:
        with pytest.raises(MismatchError, match=r"float32\[2\]' on rank 0 but .* on late' on rank 1"):
            in_mode(mode, gradient)()
        with pytest.raises(MismatchError, match="device is cpu on rank 0 but late on rank"):
            in_mode(mode, lambda: ct.allreduce(variable, name=f"elsewhere {mode}"))()
    finally:
        if place is not None:
            place.close()
