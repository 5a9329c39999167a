"""The path of schedules: programs of messages by the algorithm that is chosen. Every verb can go this way."""

from __future__ import annotations

from collections.abc import Callable

from commlib.collectives.call import Call
from commlib.collectives.host.by_messages import MessageCall
from commlib.collectives.paths import Move, Verb
from commlib.cost.chooser import Choice, Kind
from commlib.dtypes import Array
from commlib.execution.persistent import PersistentAllReduce
from commlib.group.group import Group
from commlib.runtime.compiled import Compiled
from commlib.schedule import find, program
from commlib.schedule.ir import Program


class Scheduled:
    """See `paths.Path`."""

    name, is_automatic, takes_devices = "", True, True

    def refusal(self, group: Group, verb: Verb, call: Call) -> str:
        return ""

    def compile(self, group: Group, verb: Verb, call: Call) -> Compiled:
        return MessageCall(group, call.text, verb.messages(group, call))


def choose(group: Group, verb: str, algorithm: str, size: int, nbytes: int, *, sharing: int = 1) -> Choice:
    """Return by which algorithm `size` ranks do a verb on `nbytes`, and in how many segments.

    sharing: how many such groups share a node's way to the network. Raises UsageError for an unknown algorithm.
    """
    among = None if algorithm in ("auto", "node", "hierarchical") else (find(verb, algorithm).name,)
    kind: Kind = "node" if group.one_node else "network"
    return group.runtime.chooser.choose(verb, size, nbytes, kind=kind, sharing=sharing, among=among)


def own_program(group: Group, verb: str, name: str, *, root: int = 0, segments: int = 1) -> Program:
    """Return this rank's program of an algorithm. Raises UsageError for an unknown one."""
    return program(verb, name, group.rank, group.size, root=root, segments=segments)


def planned(group: Group, call: Call, nbytes: int) -> tuple[Program, int]:
    """Return this rank's program of a call on `nbytes`, and into how many pieces to cut the data for it."""
    choice = choose(group, call.verb, call.algorithm, group.size, nbytes)
    pipelined = find(call.verb, choice.algorithm).segmented
    segments = choice.segments if pipelined else 1
    steps = own_program(group, call.verb, choice.algorithm, root=max(call.root, 0), segments=segments)
    return steps, 1 if pipelined else choice.segments


def persistent(group: Group, text: str, prepare: Callable[[], PersistentAllReduce]) -> Move:
    """Return what runs an all-reduce that is set up when it is first run, and only started from then on."""
    prepared: list[PersistentAllReduce] = []
    journal = group.journal

    def move(x: Array, target: Array) -> None:
        if not prepared:
            prepared.append(prepare())
        posted = None if journal.current is None else group.posted  # not to be asked for where it is not
        if not prepared[0].run(x, target, group.history, posted):
            raise group.different(text)

    return move
