"""Verb and Path: a collective, and one implementation of its data movement; the choice of a path for a call.

A call by name uses the path of that name, or fails with the path's refusal. An "auto" call uses the first path of the
table that accepts it and that all ranks can open, the same one on all ranks. On one node the paths between devices that
move the fewest bytes come first. On several nodes NCCL comes first, which is known to be fast between nodes. Measured
times (`commlib tune --device`) reorder the paths of device arrays that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.execution.accumulation import is_in_halves
from commlib.group.group import Group
from commlib.node.collective import Exchange, NodeCollective
from commlib.node.context import NodeContext
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue as DeviceMove
from commlib.node.device_collective import OpenSlots
from commlib.runtime.compiled_call import CompiledCall
from commlib.schedule import algorithms

Move = Callable[[Any, Any], Any]
"""Run a call on a source and a target, both contiguous and 1-D, within an operation. Return its value; None means the
target."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: what it computes on each kind of path. None: it has no form for that path.

    messages: by a schedule of messages, on memory of any device; every verb has it. exchange: on a node's board, from
    the call, this rank and the size. on_node: the same by special kernels, where the verb has them. on_devices: between
    the devices of a node, where the verb needs more than `exchange`. hierarchical: within and between several nodes, on
    memory of any device, by the steps in `schedule.hierarchy`: the elements of the data's chunks for a call and the
    number of ranks, or of all data in one number if every rank has all of it.
    elementwise: a call may run piece by piece in place, each piece a call on fewer elements.
    """

    name: str
    messages: Callable[[Group, Call], Move]
    exchange: Callable[[Call, int, int], Exchange] | None = None
    on_node: Callable[[NodeContext, Call], NodeCollective] | None = None
    hierarchical: Callable[[Call, int], tuple[int, ...]] | None = None
    on_devices: Callable[[DeviceBoard, OpenSlots, Call], DeviceMove] | None = None
    elementwise: bool = False


class Path(Protocol):
    """One implementation of collectives: a row of `call_table.PATHS`.

    name: the value of `algorithm=` that selects it; also its name in tables of measured times. is_automatic: "auto" may
    choose it without measured times. takes_host, takes_devices: arrays in host memory, on devices. only_queues: its
    calls on device arrays only queue work on a stream.
    """

    name: str
    is_automatic: bool = True
    takes_host: bool = True
    takes_devices: bool = False
    only_queues: bool = False

    def is_named(self, call: Call) -> bool:
        """Return whether a call names this path, or something that only this path can run."""
        return call.algorithm == self.name

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        """Return why it cannot run a call, as far as is known; "" if it can. The same on all ranks."""
        ...

    def is_open(self, context: PathContext) -> bool:
        """Return whether it is known to be available."""
        return True

    def open(self, context: PathContext, text: str) -> bool:
        """Set it up, within a call `text` of all ranks; return whether it is available. The same on all ranks."""
        return self.is_open(context)

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        """Prepare a call that it can run, once it is open. Not collective; running the call is."""
        ...


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path, and a verb's call as this path is to run it."""

    path: Path
    verb: Verb
    call: Call

    def compile(self, context: PathContext) -> CompiledCall:
        """Prepare the call: see `Path.compile`."""
        return self.path.compile(context, self.verb, self.call)

    def error(self, refusal: str) -> UsageError:
        """Return the error for a call whose algorithm the path refuses."""
        return UsageError(f"{self.verb.name}: algorithm {self.call.algorithm!r}: {refusal}")


def find_paths(paths: Sequence[Path], context: PathContext, verb: Verb, call: Call) -> list[PathChoice]:
    """Return the paths that may run a call, best first. Raises UsageError if the call names one that cannot run it."""
    if context.group.size == 1 and call.algorithm in ("node", "hierarchical"):
        call = replace(call, algorithm="auto")  # one rank needs no path
    is_auto = call.algorithm in ("auto", "")
    times = _measured(context, verb, call) if is_auto and not context.on_host else []
    rows = [
        path
        for path in paths
        if (path.takes_host if context.on_host else path.takes_devices)
        and ((path.is_automatic or path.name in times) if is_auto else path.is_named(call))
    ]
    refusals = [path.refusal(context, verb, call) for path in rows]
    accepting = [path for path, refusal in zip(rows, refusals, strict=True) if not refusal]
    if not accepting:
        raise PathChoice(rows[0], verb, call).error(refusals[0])
    # Messages use the fastest schedule.
    schedule = next((name for name in times if name in algorithms(verb.name)), call.algorithm)
    choices = [
        PathChoice(path, verb, replace(call, algorithm=schedule) if path.name == "messages" else call)
        for path in accepting
    ]
    names = [choice.path.name if choice.call.algorithm == "auto" else choice.call.algorithm for choice in choices]
    choices = [choices[number] for number in order_by_times(names, times)]
    # The others never run after one that is open.
    first_open = next((number for number, choice in enumerate(choices) if choice.path.is_open(context)), len(choices))
    return choices[: first_open + 1]


def _measured(context: PathContext, verb: Verb, call: Call) -> list[str]:
    """Return the algorithms with measured times for this size, the fastest first."""
    group, nodes = context.group, context.group.topology.nodes
    size = group.size if verb.name == "all_gather" else 1  # tables list the gathered size
    times = group.runtime.chooser.measured(
        verb.name, len(nodes), max(map(len, nodes)), size * call.nbytes, device=call.device
    )
    return [time.algorithm for time in times]


def order_by_times(names: Sequence[str], times: Sequence[str]) -> list[int]:
    """Return the order of `names` after sorting those with measured times among themselves, the fastest first.

    times: the measured names, the fastest first. Names without a time keep their position.
    """
    timed = iter(sorted((n for n, name in enumerate(names) if name in times), key=lambda n: times.index(names[n])))
    return [next(timed) if name in times else number for number, name in enumerate(names)]


def refuse_mean_of_halves(context: PathContext, call: Call) -> str:
    """Return why only the host can compute the call's reduction of device arrays, or ""."""
    if context.on_host or not call.op or not is_in_halves(call.dtype, call.op):
        return ""
    return f"the mean of {name_of(call.dtype)} is computed on the host, because the sum may overflow"


def refuse_device_memory(context: PathContext) -> str:
    """Return why messages cannot carry arrays of the device, or ""."""
    name = context.device.name
    if context.on_host or context.group.transport.accepts(name):
        return ""
    return f"{name}: MPI does not accept memory of this device (see COMMLIB_CUDA_AWARE)"
