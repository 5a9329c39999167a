"""NcclRanks: NVIDIA's collectives among the GPUs of several processes, through CuPy, queued on the current stream."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.aside import Aside
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import name_of
from commlib.errors import StallError, TransportError

log = logging.getLogger("commlib")

# What NCCL can combine, and how; as CuPy names it.
DTYPES = {
    name: f"NCCL_{name.upper()}"
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
}
OPERATIONS = {name: f"NCCL_{name.upper()}" for name in ("sum", "prod", "min", "max")}

SHARES_GPUS = 23000  # from this version on several ranks may be on one GPU, where the user lets them

# Seconds that a communicator gets to end its work.
_LAST = 5.0

# Communicators of this process' parent: their end would reach for its GPU.
_of_parent: list[Any] = []


def library() -> Any:
    """Return CuPy's module of NCCL. Raises TransportError if there is none."""
    try:
        found = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise TransportError(f"CuPy has no NCCL: {error}") from error
    if not found.available:
        raise TransportError("CuPy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13, as CuPy is")
    return found


def version() -> int:
    """Return the version of the library that is loaded: 23003 is 2.30.3. Raises TransportError."""
    return int(_said(library().get_version))


def unique_id() -> Any:
    """Return what NCCL is to call a new group: one rank gets it, and tells all, itself too. Raises TransportError."""
    return _said(library().get_unique_id)


def place(device: Any) -> tuple[str, str]:
    """Return what distinguishes a GPU from all others: its host, by its last start, and its bus id. TransportError."""
    runtime = importlib.import_module("cupy").cuda.runtime
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # containers of a host have one name each
    except OSError:
        host = os.uname().nodename
    return host, str(_said(lambda: runtime.deviceGetPCIBusId(device.index)))


class NcclRanks:
    """One rank's end of a group of GPUs. It ends with a group: see `group.standing.Attached`.

    The calls take contiguous arrays of the device; all ranks make the same ones in the same order. They raise
    TransportError with NCCL's words.
    """

    def __init__(self, nccl: Any, raw: Any, rank: int, name: str) -> None:
        self.rank, self._nccl, self._raw, self._name = rank, nccl, raw, name

    @classmethod
    def join(
        cls, device: Device, size: int, unique: Any, rank: int, name: str, on_wait: Callable[[], None], seconds: float
    ) -> NcclRanks:
        """Return the end of a rank. Collective; `unique` is what NCCL calls the group, as one of them has got it.

        Raises TransportError if NCCL cannot, or if not all are there within so many seconds.
        """
        nccl, stream = library(), device.current()

        def run() -> Any:
            with device.using(stream):  # a thread has a GPU of its own choice
                return nccl.NcclCommunicator(size, unique, rank)

        joining, deadline = Aside(run, "commlib NCCL"), time.monotonic() + seconds

        def look() -> None:
            on_wait()
            if time.monotonic() > deadline:
                raise TransportError(f"NCCL: not all of {size} ranks have come within {seconds:g} s")

        wait_for(joining, look)
        return cls(nccl, _said(joining.result), rank, name)

    def all_reduce(self, x: DeviceArray, target: DeviceArray, operation: str) -> None:
        """target = all ranks' x, combined."""
        self._call("allReduce", x.address, target.address, len(x), self._dtype(x), self._operation(operation))

    def reduce_scatter(self, x: DeviceArray, target: DeviceArray, operation: str) -> None:
        """target = this rank's part of all ranks' x, combined; len(x) is `size` times len(target)."""
        self._call("reduceScatter", x.address, target.address, len(target), self._dtype(x), self._operation(operation))

    def reduce(self, x: DeviceArray, target: DeviceArray, operation: str, root: int) -> None:
        """At the root: target = all ranks' x, combined."""
        self._call("reduce", x.address, target.address, len(x), self._dtype(x), self._operation(operation), root)

    def all_gather(self, x: DeviceArray, target: DeviceArray) -> None:
        """target = all ranks' x, one after another; x may be this rank's part of it. Any dtype."""
        self._call("allGather", x.address, target.address, x.nbytes, self._nccl.NCCL_UINT8)

    def broadcast(self, x: DeviceArray, root: int) -> None:
        """x = the root's x. Any dtype."""
        self._call("broadcast", x.address, x.address, x.nbytes, self._nccl.NCCL_UINT8, root)

    def _call(self, name: str, *arguments: int) -> None:
        raw = self._raw
        if raw is None:
            raise TransportError(f"{self._name}: NCCL: this communicator was given up")
        cupy = importlib.import_module("cupy")
        _said(raw.check_async_error)  # of what was queued before: a peer that is gone, for example
        _said(lambda: getattr(raw, name)(*arguments, cupy.cuda.get_current_stream().ptr))

    def _dtype(self, x: DeviceArray) -> int:
        return int(getattr(self._nccl, DTYPES[name_of(x.dtype)]))

    def _operation(self, operation: str) -> int:
        return int(getattr(self._nccl, OPERATIONS[operation]))

    def leave(self, reason: str) -> None:
        """End on this rank. With a reason the ranks are out of step: streams that wait for a peer are let go."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        if reason:
            Aside(raw.abort, "commlib NCCL abort")  # it may wait for peers that do not come
            return
        deadline = time.monotonic() + _LAST

        def look() -> None:
            if time.monotonic() > deadline:
                raise StallError("")

        try:
            wait_for(Aside(raw.destroy, "commlib NCCL end"), look)
        except StallError:
            log.warning("%s: NCCL has not ended after %s s, and is left as it is", self._name, _LAST)

    def close(self) -> None:
        self.leave("")

    def halt(self) -> None:
        """See `group.standing.Attached`."""
        _of_parent.append(self._raw)
        self._raw = None


def _said(run: Callable[[], Any]) -> Any:
    """Return what a call of NCCL's returns. Raises its error as ours."""
    try:
        return run()
    except Exception as error:  # CuPy's class for them does not know the codes of newer NCCLs, and raises KeyError
        raise TransportError(f"NCCL: {type(error).__name__}: {error}; NCCL_DEBUG=WARN tells more") from error
