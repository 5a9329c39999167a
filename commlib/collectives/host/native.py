"""Native path: MPI's own all-reduce, in pieces. MPI libraries reduce pieces several times faster than large arrays."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.host.message_call import BlockingCall, MessageCall
from commlib.collectives.paths import Path, Verb, refuse_device_memory
from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.dtypes import BITWISE, Array, kernel_operation, name_of
from commlib.execution.accumulation import Accumulation, is_widened
from commlib.runtime.compiled_call import CompiledCall


class NativePath(Path):
    """The path by MPI, used only if `algorithm="native"` or measured times select it."""

    name, is_automatic, takes_devices = "native", False, True

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        if verb.name != "all_reduce":
            return "it supports only all_reduce"
        if context.group.native is None:
            return "it needs MPI, and this communicator does not use MPI"
        dtype = name_of(call.dtype)
        if is_widened(call.dtype, call.op):
            return f"MPI cannot reduce {dtype} by {kernel_operation(dtype, call.op)} without losing digits"
        return refuse_device_memory(context)

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        from mpi4py import MPI

        group = context.group
        mpi_op = _operation(MPI, call)
        piece = max(1, group.config.native_kib * 1024 // call.dtype.itemsize)

        def move(x: Array, target: Array) -> None:
            accumulation = Accumulation(x, call.op, group.size)
            work = accumulation.working_array(target)
            on_host = type(work) is not DeviceArray
            if not on_host:  # MPI reads the memory immediately, not in stream order
                wait_for(work.device.current().record(), group.waits.watch(f"{call.text}: work on {call.device}", ()))
            for start in range(0, len(work), piece):
                part = work[start : start + piece]
                group.native.Allreduce(MPI.IN_PLACE, part if on_host else _mpi_buffer(MPI, part), mpi_op)
            accumulation.finish(work, target)

        return MessageCall(group, call.text, move) if group.size == 1 else BlockingCall(group, call.text, move)


def _mpi_buffer(MPI: Any, array: DeviceArray) -> list[Any]:
    """Return device memory as an mpi4py buffer specification."""
    return [MPI.buffer.fromaddress(array.address, array.nbytes), MPI.Datatype.fromcode(array.dtype.char)]


def _operation(MPI: Any, call: Call) -> Any:
    dtype = name_of(call.dtype)
    operation = kernel_operation(dtype, call.op)
    if operation in BITWISE:
        return getattr(MPI, f"{'L' if dtype == 'bool' else 'B'}{operation.upper()}")
    return MPI.SUM if operation == "mean" else getattr(MPI, operation.upper())
