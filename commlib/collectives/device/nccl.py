"""NCCL path: collectives on GPU arrays by NVIDIA's library. Each rank needs its own GPU.

The first call of a group that uses this path creates the NCCL communicator. All ranks get bitwise equal results. NCCL
chooses the order of summation, so float results may differ bitwise from other paths and from run to run. Half precision
accumulates in float32 and is rounded once, and commlib's kernel divides means, as on all paths. NaN is an exception:
NCCL's min and max may ignore it, so "auto" does not choose NCCL for min and max of floats.

As with NCCL in general, call groups that share GPUs in the same order on all ranks: kernels of two groups may wait for
each other.
"""

from __future__ import annotations

from functools import partial

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.device.nccl_verbs import MOVES, is_once
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.paths import Path, Verb, refuse_mean_of_halves
from commlib.devices.array import DeviceArray
from commlib.devices.cuda import nccl
from commlib.dtypes import FLOATS, accumulator_dtype, kernel_operation, name_of
from commlib.runtime.compiled_call import CompiledCall


class NcclPath(Path):
    """The path by NCCL."""

    name, takes_devices = "nccl", True

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        size = context.group.size
        if reason := _exclusion(context):
            return reason
        if verb.name not in MOVES:
            return f"it supports only {', '.join(MOVES)}"
        if call.op:
            dtype, operation = name_of(call.dtype), kernel_operation(name_of(call.dtype), call.op)
            combined = dtype if is_once(call, size) else accumulator_dtype(dtype, operation)
            if combined not in nccl.DTYPES or operation not in (*nccl.OPERATIONS, "mean"):
                return f"it does not support {call.op} of {dtype}"
        if verb.name == "reduce_scatter" and isinstance(call.size, tuple) and call.size[0] % size:
            return f"the length of dimension 0, {call.size[0]}, must be a multiple of {size}, the number of ranks"
        if not self.is_named(call):
            if size == 1:
                return "one rank needs no communicator"
            if call.op in ("min", "max") and name_of(call.dtype) in FLOATS:
                return "it may ignore NaN"
        return refuse_mean_of_halves(context, call) or context.nccl.refusal

    def is_open(self, context: PathContext) -> bool:
        return context.nccl.ranks is not None

    def open(self, context: PathContext, text: str) -> bool:
        return not _exclusion(context) and context.nccl.open(text) is not None

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        group, ranks = context.group, context.nccl.ranks
        assert ranks is not None
        move = partial(MOVES[verb.name], ranks, call, group.size) if call.count else _queue_nothing
        return MessageCall(group, call.text, move, flat=False)


def _exclusion(context: PathContext) -> str:
    """Return why no call of the group can use NCCL there, or ""."""
    if context.device.name != "cuda":
        return "it supports only arrays on a GPU"
    return "" if context.group.config.nccl else "COMMLIB_NCCL=0 turns it off"


def _queue_nothing(x: DeviceArray, target: DeviceArray) -> None:
    pass
