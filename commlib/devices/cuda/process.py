"""The GPU of this process, chosen on first use."""

from __future__ import annotations

import threading
from typing import Any

from commlib.arguments import install
from commlib.devices.cuda import foreign_arrays
from commlib.devices.cuda.device import CudaDevice
from commlib.errors import UsageError


class _Process:
    """The device of this process, once it is chosen."""

    def __init__(self) -> None:
        self.device: CudaDevice | None = None
        self.lock = threading.Lock()


_process = _Process()


def device(index: int = -1) -> CudaDevice:
    """Return this process' GPU. index: the GPU of an array; -1 if unknown.

    The first call chooses the GPU for the process: `index`, or the current GPU. Raises UsageError if there is no GPU,
    or for another GPU later.
    """
    with _process.lock:
        if _process.device is None:
            _process.device = _make(index)
        current = _process.device
    if index not in (-1, current.index):
        raise UsageError(
            f"an array is on GPU {index}, but this process already uses GPU {current.index}, and a process uses only "
            "one GPU: choose it by local_rank before the first allocation (torch.cuda.set_device, "
            "cupy.cuda.Device(n).use(), or CUDA_VISIBLE_DEVICES)"
        )
    return current


def find_used() -> CudaDevice | None:
    """Return the GPU that this process already uses, or None."""
    return _process.device


def device_of(x: Any) -> CudaDevice | None:
    """Return the GPU of an array of any library; None if the array is not on a GPU. Raises UsageError."""
    current = _process.device
    if current is not None and current.makes(x):  # by far the most frequent case
        return current if x.data.device_id == current.index else device(x.data.device_id)
    index = foreign_arrays.gpu_of(x)
    return None if index is None else device(index)


def choose(place: int) -> None:
    """Make GPU `place` modulo the number of visible GPUs current; `place` is the local rank.

    Raises UsageError if there is none. A GPU that the process already uses stays its GPU.
    """
    cupy, runtime = library()
    try:
        cupy.cuda.Device(place % runtime.getDeviceCount()).use()
    except runtime.CUDARuntimeError as error:
        raise UsageError(f"there is no GPU that this process can use: {error}") from error


def refusal() -> str:
    """Return why this process has no GPU, or ""."""
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
    cupy, runtime = library()
    try:
        return CudaDevice(cupy, runtime.getDevice() if index < 0 else index)
    except runtime.CUDARuntimeError as error:
        raise UsageError(f"there is no GPU that this process can use: {error}") from error


def library() -> tuple[Any, Any]:
    """Return CuPy and its module of the CUDA runtime. Raises UsageError."""
    try:
        import cupy
    except ImportError as error:
        raise UsageError(f"arrays on a GPU need CuPy ({error}): {install('cuda12', 'cuda13')}") from error
    return cupy, cupy.cuda.runtime
