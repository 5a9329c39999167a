"""Scheduled path: run the message program of the chosen algorithm. It supports every verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.paths import Move, Path, Verb, refuse_device_memory, refuse_mean_of_halves
from commlib.cost.chooser import Choice, LinkKind
from commlib.cost.records import BEYOND_SCHEDULES
from commlib.dtypes import Array
from commlib.execution.persistent_programs import PersistentAllReduce
from commlib.group.group import Group
from commlib.runtime.compiled_call import CompiledCall
from commlib.schedule import find, program
from commlib.schedule.ir import Program


class SchedulePath(Path):
    """The path of message schedules. It runs every call, on device arrays if the transport accepts their memory."""

    name, takes_devices = "messages", True

    def is_named(self, call: Call) -> bool:
        if call.algorithm == "host":  # a path of device arrays
            return not call.device
        return call.algorithm not in BEYOND_SCHEDULES

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        return refuse_mean_of_halves(context, call) or refuse_device_memory(context)

    def is_open(self, context: PathContext) -> bool:
        return not refuse_device_memory(context)

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        if call.algorithm == self.name and not context.on_host:
            call = replace(call, algorithm="auto")
        return MessageCall(context.group, call.text, verb.messages(context.group, call))


def choose(group: Group, verb: str, algorithm: str, size: int, nbytes: int) -> Choice:
    """Choose the algorithm and the number of segments for a verb among `size` ranks on `nbytes`. Raises UsageError."""
    among = None if algorithm == "auto" else (find(verb, algorithm).name,)
    kind: LinkKind = "node" if group.one_node else "network"
    return group.runtime.chooser.choose(verb, size, nbytes, kind=kind, among=among)


def own_program(group: Group, verb: str, name: str, *, root: int = 0, segments: int = 1) -> Program:
    """Return this rank's program of an algorithm. Raises UsageError for an unknown algorithm."""
    return program(verb, name, group.rank, group.size, root=root, segments=segments)


def plan_program(group: Group, call: Call, nbytes: int) -> tuple[Program, int]:
    """Return this rank's program for a call on `nbytes`, and the number of pieces to cut the data into."""
    choice = choose(group, call.verb, call.algorithm, group.size, nbytes)
    pipelined = find(call.verb, choice.algorithm).segmented
    segments = choice.segments if pipelined else 1
    steps = own_program(group, call.verb, choice.algorithm, root=max(call.root, 0), segments=segments)
    return steps, 1 if pipelined else choice.segments


def make_persistent_move(group: Group, text: str, prepare: Callable[[], PersistentAllReduce]) -> Move:
    """Return a Move that sets up a persistent all-reduce in its first run and only starts it from then on."""
    prepared: list[PersistentAllReduce] = []
    journal = group.progress.journal

    def move(x: Array, target: Array) -> None:
        if not prepared:
            prepared.append(prepare())
        posted = None if journal.current is None else group.programs.posted  # skip the look-up if no call is recorded
        if not prepared[0].run(x, target, group.status.history, posted):
            raise group.calls.different(text)

    return move
