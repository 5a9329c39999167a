"""all_reduce: every rank gets the reduction of all ranks' arrays."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import choose, make_persistent_move, own_program
from commlib.collectives.operands import copy_if_overlapping, result, source
from commlib.collectives.paths import Move, Verb
from commlib.devices.arrays import device_of, name_of_device
from commlib.dtypes import Array, kernel_operation, name_of
from commlib.execution.accumulation import Accumulation, is_in_halves, is_widened, wide_bytes
from commlib.execution.persistent_programs import PERSISTENT_BYTES, PersistentAllReduce
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node import device_collective
from commlib.node.collective import NodeCollective
from commlib.node.context import NodeContext
from commlib.node.device_board import DeviceBoard
from commlib.node.signature import signature
from commlib.schedule import find
from commlib.schedule.layout import blocks


def all_reduce(calls: Calls, x: Any, op: str, out: Any, algorithm: str) -> PreparedCall:
    array = source(x, "all_reduce")
    target = result(out, array.shape, array.dtype, "all_reduce", device_of(array))
    device = name_of_device(array)
    kind = array.dtype, array.size, op, algorithm
    key = (kind, device) if device else kind
    compiled = calls.all_reduces.get(key)
    if compiled is None:
        kernel_operation(name_of(array.dtype), op)
        call = Call("all_reduce", array.size, array.dtype, op, algorithm=algorithm, device=device)
        compiled = calls.new_all_reduce(VERB, call, key)
    return PreparedCall.into(compiled, copy_if_overlapping(array.reshape(-1), target.flat), target, x)


def _on_node(context: NodeContext, call: Call) -> NodeCollective:
    op = ReduceFunction.of(call.dtype, call.op, context.board.size)
    return NodeCollective.all_reduce(context, call.text, call.count, op)


def _on_devices(board: DeviceBoard, open_slots: device_collective.OpenSlots, call: Call) -> device_collective.Enqueue:
    op = ReduceFunction.of(call.dtype, call.op, board.size)
    return device_collective.all_reduce(board, open_slots, call.count, op)


def choose_algorithm(group: Group, verb: str, call: Call) -> tuple[str, int]:
    """Return an algorithm for a reduction among all ranks, and the number of segments to cut the data into."""
    if call.algorithm == "auto" and is_widened(call.dtype, call.op):
        # Only "direct" sends the narrow inputs. All others send partial sums in a wider dtype: twice the bytes.
        narrow = choose(group, verb, "direct", group.size, call.nbytes)
        others = choose(group, verb, "auto", group.size, wide_bytes(call.count, call.dtype, call.op))
        best = min(narrow, others, key=lambda choice: choice.seconds)
    else:
        best = choose(group, verb, call.algorithm, group.size, call.nbytes)
    return best.algorithm, best.segments


def _messages(group: Group, call: Call) -> Move:
    name, segments = choose_algorithm(group, "all_reduce", call)
    pipelined = find("all_reduce", name).segmented
    steps = own_program(group, "all_reduce", name, segments=segments if pipelined else 1)
    text = call.text

    if call.nbytes <= PERSISTENT_BYTES and not call.device and not is_in_halves(call.dtype, call.op):

        def prepare() -> PersistentAllReduce:
            small = PersistentAllReduce(ReduceFunction.of(call.dtype, call.op, group.size), call.count)
            small.add_messages(steps, group.transport, signature(text), group.waits.watch_each(text))
            return small

        return make_persistent_move(group, text, prepare)

    def move(x: Array, target: Array) -> None:
        accumulation = Accumulation(x, call.op, group.size, once=name == "direct")
        work = accumulation.working_array(target)
        layouts = blocks(len(work), steps.regions[0], 1 if pipelined else segments)
        group.programs.execute(steps, [[Region(work, layout)] for layout in layouts], text, accumulation.reduce_op)
        accumulation.finish(work, target)

    return move


VERB = Verb(
    "all_reduce",
    _messages,
    on_node=_on_node,
    on_devices=_on_devices,
    hierarchical=lambda call, size: (call.count,),
    elementwise=True,
)
