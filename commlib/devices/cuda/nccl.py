"""NcclRanks: an NCCL communicator through CuPy. Its collectives are queued on the current stream."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import name_of
from commlib.errors import StallError, TransportError

log = logging.getLogger("commlib")

# The dtypes and reductions of NCCL, by CuPy's names.
DTYPES = {
    name: f"NCCL_{name.upper()}"
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
}
OPERATIONS = {name: f"NCCL_{name.upper()}" for name in ("sum", "prod", "min", "max")}

SHARES_GPUS = 23000  # from this version on, ranks may share a GPU if the user allows it

# Seconds to wait for a communicator to finish its work.
_LAST = 5.0

# Communicators of the parent process, kept alive: destroying them would use its GPU.
_of_parent: list[Any] = []


def library() -> Any:
    """Return CuPy's NCCL module. Raises TransportError if there is none."""
    try:
        module = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise TransportError(f"CuPy has no NCCL: {error}") from error
    if not module.available:
        raise TransportError("CuPy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13, to match CuPy's CUDA")
    return module


def version() -> int:
    """Return the version of the loaded library: 23003 is 2.30.3. Raises TransportError."""
    return int(_call_nccl(library().get_version))


def unique_id() -> Any:
    """Return a new NCCL unique id, which one rank broadcasts to all ranks. Raises TransportError."""
    return _call_nccl(library().get_unique_id)


def place(device: Any) -> tuple[str, str]:
    """Return a unique identity of a GPU: its host's boot id and its bus id. Raises TransportError."""
    runtime = importlib.import_module("cupy").cuda.runtime
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # containers have own host names
    except OSError:
        host = os.uname().nodename
    return host, str(_call_nccl(lambda: runtime.deviceGetPCIBusId(device.index)))


class NcclRanks:
    """One rank of an NCCL communicator. It closes with its group: see `group.group_status.GroupPart`.

    The methods take contiguous arrays of the device. All ranks must make the same calls in the same order. Errors are
    TransportError with NCCL's message.
    """

    def __init__(self, nccl: Any, raw: Any, rank: int, name: str) -> None:
        self.rank, self._nccl, self._raw, self._name = rank, nccl, raw, name

    @classmethod
    def join(
        cls, device: Device, size: int, unique: Any, rank: int, name: str, on_wait: Callable[[], None], seconds: float
    ) -> NcclRanks:
        """Join an NCCL communicator. Collective; `unique` is the unique id of one rank.

        Raises TransportError if NCCL fails, or if not all ranks have joined within `seconds`.
        """
        nccl, stream = library(), device.current()

        def run() -> Any:
            with device.using(stream):  # the current GPU is set for each thread
                return nccl.NcclCommunicator(size, unique, rank)

        joining, deadline = ThreadCall(run, "commlib NCCL"), time.monotonic() + seconds

        def look() -> None:
            on_wait()
            if time.monotonic() > deadline:
                raise TransportError(f"NCCL: not all of {size} ranks have joined within {seconds:g} s")

        wait_for(joining, look)
        return cls(nccl, _call_nccl(joining.result), rank, name)

    def all_reduce(self, x: DeviceArray, target: DeviceArray, operation: str) -> None:
        """target = the reduction of all ranks' x."""
        self._call("allReduce", x.address, target.address, len(x), self._dtype(x), self._operation(operation))

    def reduce_scatter(self, x: DeviceArray, target: DeviceArray, operation: str) -> None:
        """target = this rank's part of the reduction of all ranks' x; len(x) is `size` times len(target)."""
        self._call("reduceScatter", x.address, target.address, len(target), self._dtype(x), self._operation(operation))

    def reduce(self, x: DeviceArray, target: DeviceArray, operation: str, root: int) -> None:
        """At the root: target = the reduction of all ranks' x."""
        self._call("reduce", x.address, target.address, len(x), self._dtype(x), self._operation(operation), root)

    def all_gather(self, x: DeviceArray, target: DeviceArray) -> None:
        """target = all ranks' x, concatenated; x may be this rank's part of target. Any dtype."""
        self._call("allGather", x.address, target.address, x.nbytes, self._nccl.NCCL_UINT8)

    def broadcast(self, x: DeviceArray, root: int) -> None:
        """x = the root's x. Any dtype."""
        self._call("broadcast", x.address, x.address, x.nbytes, self._nccl.NCCL_UINT8, root)

    def _call(self, name: str, *arguments: int) -> None:
        raw = self._raw
        if raw is None:
            raise TransportError(f"{self._name}: NCCL: this communicator was closed or aborted")
        cupy = importlib.import_module("cupy")
        _call_nccl(raw.check_async_error)  # an error of earlier queued work, for example a lost peer
        _call_nccl(lambda: getattr(raw, name)(*arguments, cupy.cuda.get_current_stream().ptr))

    def _dtype(self, x: DeviceArray) -> int:
        return int(getattr(self._nccl, DTYPES[name_of(x.dtype)]))

    def _operation(self, operation: str) -> int:
        return int(getattr(self._nccl, OPERATIONS[operation]))

    def leave(self, reason: str) -> None:
        """Destroy the communicator. With a reason (ranks are out of step): abort it, which releases waiting streams."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        if reason:
            ThreadCall(raw.abort, "commlib NCCL abort")  # abort may wait for missing peers
            return
        deadline = time.monotonic() + _LAST

        def look() -> None:
            if time.monotonic() > deadline:
                raise StallError("")

        try:
            wait_for(ThreadCall(raw.destroy, "commlib NCCL end"), look)
        except StallError:
            log.warning("%s: NCCL has not shut down after %s s; its communicator is leaked", self._name, _LAST)

    def close(self) -> None:
        self.leave("")

    def halt(self) -> None:
        """Drop the communicator in a forked child: see `group.group_status.GroupPart`."""
        _of_parent.append(self._raw)
        self._raw = None


def _call_nccl(run: Callable[[], Any]) -> Any:
    """Return the value of an NCCL call. Convert its errors to TransportError."""
    try:
        return run()
    except Exception as error:  # CuPy's error class raises KeyError for codes of newer NCCL versions
        raise TransportError(f"NCCL: {type(error).__name__}: {error}; set NCCL_DEBUG=WARN for details") from error


class ThreadCall:
    """A call of NCCL in a daemon thread, because it may block uninterruptibly; the thread does not block exit.

    It is an `Event`: done when the call has returned.
    """

    def __init__(self, run: Callable[[], Any], name: str) -> None:
        self._run, self._value = run, None
        self._error: BaseException | None = None
        self._happened = threading.Event()
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            self._work()

    def _work(self) -> None:
        try:
            self._value = self._run()
        except BaseException as error:
            self._error = error
        self._happened.set()

    def done(self) -> bool:
        return self._happened.is_set()

    def result(self) -> Any:
        """Return the value of the call, or raise its error. Call it only when done."""
        if self._error is not None:
            raise self._error
        return self._value
