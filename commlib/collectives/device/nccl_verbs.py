"""NCCL verbs. As on all paths, half precision accumulates in float32, unless this cannot change the result."""

from __future__ import annotations

from collections.abc import Callable

from commlib.collectives.call import Call
from commlib.devices.array import DeviceArray
from commlib.devices.cuda.nccl import NcclRanks
from commlib.execution.accumulation import Accumulation

Move = Callable[[NcclRanks, Call, int, DeviceArray, DeviceArray], None]
"""Queue a call of a verb on a 1-D source and target. The int is the number of ranks."""


def _all_reduce(ranks: NcclRanks, call: Call, size: int, x: DeviceArray, target: DeviceArray) -> None:
    accumulation = _accumulation(call, size, x)
    source = accumulation.x
    into = source if accumulation.widened else target
    ranks.all_reduce(source, into, accumulation.reduce_op.operation)
    accumulation.finish(into, target)


def _reduce_scatter(ranks: NcclRanks, call: Call, size: int, x: DeviceArray, target: DeviceArray) -> None:
    accumulation = _accumulation(call, size, x)
    source = accumulation.x
    part = source.empty(target.shape, source.dtype) if accumulation.widened else target
    ranks.reduce_scatter(source, part, accumulation.reduce_op.operation)
    accumulation.finish(part, target)


def _reduce(ranks: NcclRanks, call: Call, size: int, x: DeviceArray, target: DeviceArray) -> None:
    accumulation = _accumulation(call, size, x)
    source = accumulation.x
    into = source if accumulation.widened else target
    ranks.reduce(source, into, accumulation.reduce_op.operation, call.root)
    if ranks.rank == call.root:
        accumulation.finish(into, target)


def _all_gather(ranks: NcclRanks, call: Call, size: int, x: DeviceArray, target: DeviceArray) -> None:
    ranks.all_gather(x, target)


def _broadcast(ranks: NcclRanks, call: Call, size: int, x: DeviceArray, target: DeviceArray) -> None:
    ranks.broadcast(x, call.root)


MOVES: dict[str, Move] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
}


def _accumulation(call: Call, size: int, x: DeviceArray) -> Accumulation:
    return Accumulation(x, call.op, size, once=is_once(call, size))


def is_once(call: Call, size: int) -> bool:
    """Return whether the reduction rounds each element at most once, so NCCL may use the dtype of the arrays."""
    return call.op in ("min", "max") or (size == 2 and call.op != "mean")
