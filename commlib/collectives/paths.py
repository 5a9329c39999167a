"""Verb and Path: a collective, and one implementation of its data movement. Each path has a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from commlib.collectives.call import Call
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.node.collective import Exchange, NodeCollective
from commlib.node.context import NodeContext
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue as DeviceMove
from commlib.node.device_collective import OpenSlots
from commlib.runtime.compiled_call import CompiledCall

Move = Callable[[Array, Array], Any]
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
    """One implementation of collectives."""

    @property
    def name(self) -> str:
        """The value of `algorithm=` that selects it."""
        ...

    @property
    def is_automatic(self) -> bool:
        """Whether "auto" may choose it."""
        ...

    @property
    def takes_devices(self) -> bool:
        """Whether it takes device arrays whose memory the transport accepts."""
        ...

    def refusal(self, group: Group, verb: Verb, call: Call) -> str:
        """Return why this path cannot run a call, or "" if it can. The same on all ranks."""
        ...

    def compile(self, group: Group, verb: Verb, call: Call) -> CompiledCall:
        """Prepare a call that this path can run. Not collective; running the call is."""
        ...


def compile_call(paths: tuple[Path, ...], group: Group, verb: Verb, call: Call) -> CompiledCall:
    """Compile a call for the path that it names, else for the first automatic path that can run it.

    The last path runs every call. Raises UsageError if the named path cannot run it, or for an unknown algorithm.
    """
    for path in paths[:-1]:
        if call.algorithm == path.name and (group.size > 1 or not path.is_automatic):
            if refusal := path.refusal(group, verb, call):
                raise UsageError(f"{verb.name}: algorithm {path.name!r}: {refusal}")
            return path.compile(group, verb, call)
    for path in paths[:-1]:
        if path.is_automatic and call.algorithm == "auto" and not path.refusal(group, verb, call):
            return path.compile(group, verb, call)
    return paths[-1].compile(group, verb, call)
