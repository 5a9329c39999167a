"""The GPU of this process: found when something of it is first used."""

from __future__ import annotations

import threading
from typing import Any

from commlib.devices.cuda import foreign
from commlib.devices.cuda.device import CudaDevice
from commlib.errors import UsageError
from commlib.extras import install


class _Process:
    """Holds the device, once there is one."""

    def __init__(self) -> None:
        self.device: CudaDevice | None = None
        self.lock = threading.Lock()


_process = _Process()


def device(index: int = -1) -> CudaDevice:
    """Return this process' GPU. index: that of an array; -1 where that is not known: the one that is current.

    The first one that is used stays the process' own. Raises UsageError if there is none, or for another one.
    """
    with _process.lock:
        if _process.device is None:
            _process.device = _make(index)
        found = _process.device
    if index not in (-1, found.index):
        raise UsageError(
            f"an array is on GPU {index}, but this process has used GPU {found.index} so far, and uses one GPU: "
            "choose it before anything is made there (torch.cuda.set_device, cupy.cuda.Device(n).use(), or "
            "CUDA_VISIBLE_DEVICES), by the rank's place on its node (local_rank)"
        )
    return found


def used() -> CudaDevice | None:
    """Return the GPU that this process has used before, if any."""
    return _process.device


def device_of(x: Any) -> CudaDevice | None:
    """Return the GPU that has an array of any library; None if it is not on one. Raises UsageError."""
    found = _process.device
    if found is not None and found.makes(x):  # by far the most frequent
        return found if x.data.device_id == found.index else device(x.data.device_id)
    index = foreign.gpu_of(x)
    return None if index is None else device(index)


def choose(place: int) -> None:
    """Let this process, the `place`-th one of its node, use the GPU that is its share of those that it sees.

    Raises UsageError if there is none. What was used before stays.
    """
    cupy, runtime = _library()
    try:
        cupy.cuda.Device(place % runtime.getDeviceCount()).use()
    except runtime.CUDARuntimeError as error:
        raise UsageError(f"there is no GPU that this process can use: {error}") from error


def refusal() -> str:
    """Return why this process has none."""
    try:
        device()
    except UsageError as error:
        return str(error)
    return ""


def device_or_none() -> CudaDevice | None:
    """Return this process' GPU; None if it has none."""
    try:
        return device()
    except UsageError:
        return None


def _make(index: int) -> CudaDevice:
    cupy, runtime = _library()
    try:
        return CudaDevice(cupy, runtime.getDevice() if index < 0 else index)
    except runtime.CUDARuntimeError as error:
        raise UsageError(f"there is no GPU that this process can use: {error}") from error


def _library() -> tuple[Any, Any]:
    """Return CuPy, and what it has of CUDA's runtime. Raises UsageError."""
    try:
        import cupy
    except ImportError as error:
        raise UsageError(f"arrays on a GPU need CuPy ({error}): {install('cuda12', 'cuda13')}") from error
    return cupy, cupy.cuda.runtime
