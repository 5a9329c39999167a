"""all_to_all: every rank sends each rank an equal part of its array."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import plan_program
from commlib.collectives.operands import copy_if_shared, result, rows, source
from commlib.collectives.paths import Move, Verb
from commlib.devices.arrays import device_of, empty_like, name_of_device
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.kernels.fields.gate import OTHER_ARRAY
from commlib.node.collective import Exchange, ranges
from commlib.schedule.layout import cut, uneven


def all_to_all(calls: Calls, x: Any, out: Any, algorithm: str) -> PreparedCall:
    size = calls.group.size
    array = source(x, "all_to_all")
    length, _ = rows(array, "all_to_all")
    if length % size:
        raise UsageError(
            f"all_to_all: dimension 0 of x has length {length}, which is not a multiple of {size} ranks; "
            "use all_to_all_v for uneven parts"
        )
    target = result(out, array.shape, array.dtype, "all_to_all", device_of(array))
    flat = copy_if_shared(array.reshape(-1), target.flat)  # a receive may overwrite a chunk before it is sent
    call = Call("all_to_all", array.shape, array.dtype, algorithm=algorithm, device=name_of_device(array))
    compiled = calls.find(VERB, call, (array.dtype, array.shape, algorithm), array.shape, OTHER_ARRAY)
    return PreparedCall.into(compiled, flat, target, x)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    nbytes = call.nbytes // size
    parts = ranges(uneven([call.count // size] * size), call.dtype.itemsize)
    return Exchange(parts, parts, nbytes, [rank * nbytes] * size, call.nbytes)


def _messages(group: Group, call: Call) -> Move:
    steps, pieces = plan_program(group, call, call.nbytes)
    pieces = pieces if steps.sends_single_chunks else 1
    chunk = call.count // group.size
    layouts = [cut(uneven([chunk] * chunks), pieces) for chunks in steps.regions]

    def move(x: Array, target: Array) -> None:
        scratch = [empty_like(x, chunks * chunk) for chunks in steps.regions[2:]]
        arrays = [x, target, *scratch]
        regions = [
            [Region(array, layouts[number][piece]) for number, array in enumerate(arrays)] for piece in range(pieces)
        ]
        group.programs.execute(steps, regions, call.text)

    return move


VERB = Verb(
    "all_to_all",
    _messages,
    exchange=_exchange,
    hierarchical=lambda call, size: (call.count // size,) * size,
)
