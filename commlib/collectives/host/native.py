"""The path of MPI's own all-reduce, in pieces: MPI libraries are several times faster so than on large arrays."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.host.by_messages import BlockingCall, MessageCall
from commlib.collectives.paths import Verb
from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.dtypes import BITWISE, Array, kernel_operation, name_of
from commlib.execution.accumulation import Accumulation, is_widened
from commlib.group.group import Group
from commlib.runtime.compiled import Compiled


class Native:
    """See `paths.Path`. Only where it is asked for."""

    name, is_automatic, takes_devices = "native", False, True

    def refusal(self, group: Group, verb: Verb, call: Call) -> str:
        if verb.name != "all_reduce":
            return "it is for all_reduce only"
        if group.native is None:
            return "it needs MPI, and this communicator has none"
        dtype = name_of(call.dtype)
        if is_widened(call.dtype, call.op):
            return f"MPI cannot reduce {dtype} by {kernel_operation(dtype, call.op)} without losing digits"
        return ""

    def compile(self, group: Group, verb: Verb, call: Call) -> Compiled:
        from mpi4py import MPI

        mpi_op = _operation(MPI, call)
        piece = max(1, group.config.native_kib * 1024 // call.dtype.itemsize)

        def move(x: Array, target: Array) -> None:
            accumulation = Accumulation(x, call.op, group.size)
            work = accumulation.work_in(target)
            is_there = type(work) is not DeviceArray
            if not is_there:  # MPI reads at once
                wait_for(work.device.current().record(), group.watch(f"{call.text}: work on {call.device}", ()))
            for start in range(0, len(work), piece):
                part = work[start : start + piece]
                group.native.Allreduce(MPI.IN_PLACE, part if is_there else _addressed(MPI, part), mpi_op)
            accumulation.finish(work, target)

        return MessageCall(group, call.text, move) if group.size == 1 else BlockingCall(group, call.text, move)


def _addressed(MPI: Any, array: DeviceArray) -> list[Any]:
    """Return a device's memory as mpi4py takes it."""
    return [MPI.buffer.fromaddress(array.address, array.nbytes), MPI.Datatype.fromcode(array.dtype.char)]


def _operation(MPI: Any, call: Call) -> Any:
    dtype = name_of(call.dtype)
    operation = kernel_operation(dtype, call.op)
    if operation in BITWISE:
        return getattr(MPI, f"{'L' if dtype == 'bool' else 'B'}{operation.upper()}")
    return MPI.SUM if operation == "mean" else getattr(MPI, operation.upper())
