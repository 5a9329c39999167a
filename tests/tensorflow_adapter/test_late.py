"""TensorFlow's eager tensors on the late device: commlib's work is late, and must be waited for."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import commlib_tensorflow as ct
from commlib.dtypes import DTYPES
from tests.late import LATE
from tests.tensorflow_adapter import device_verbs
from tests.tensorflow_adapter.late import HostTensors, watched


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTensors]:
    monkeypatch.setattr(LATE, "delay", 1e-3)
    yield from watched(alone=ct.size() == 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_verbs(comm: Any, place: HostTensors, dtype: str) -> None:
    device_verbs.verbs(comm, place, dtype)


def test_gradients_of_verbs(comm: Any, place: HostTensors) -> None:
    device_verbs.gradients(comm, place)


def test_results_in_use(comm: Any, place: HostTensors) -> None:
    device_verbs.results_in_use(comm, place)


def test_returned_memory_is_reused_only_after_tensorflow_has_run(comm: Any, place: HostTensors) -> None:
    """TensorFlow returns memory once its readers are queued, not when they have run."""

    def there() -> Any:
        LATE.synchronise()
        result = np.empty(1000, np.float32)
        ctypes.memmove(result.ctypes.data, address, result.nbytes)
        return result

    got = ct.all_reduce(place.put(np.ones(1000, np.float32)), ranks=comm)
    address = place.taken[-1]
    del got
    gc.collect()
    assert (there() == comm.size).all()
    ct.all_reduce(place.put(np.ones(3, np.float32)), ranks=comm)  # the next tensor is read
    gc.collect()
    assert np.isnan(there()).all()


@pytest.mark.ranks(min=2)
def test_a_missing_wait_is_detected(comm: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr("commlib_tensorflow.devices.wait_for", lambda event, on_wait: None)
    with LATE.careless(), pytest.raises(AssertionError):
        device_verbs.results_in_use(comm, place)
    comm.barrier()
