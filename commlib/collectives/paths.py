"""Paths: the ways on which a call's data may go. A path is one file; this is the table of them, asked in its order."""

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
from commlib.node.device_collective import Move as DeviceMove
from commlib.node.device_collective import Open
from commlib.runtime.compiled import Compiled

Move = Callable[[Array, Array], Any]
"""Do a call on a source and a target, both contiguous and 1-D, within an operation; return its value, or None for the
target."""


@dataclass(frozen=True, slots=True)
class Verb:
    """Describe a verb, apart from the way that its data goes.

    messages: what it does by a schedule, on the memory of any device; every verb has it. exchange: what it is on a
    board, from the call, this rank and the size; or on_node, where that has kernels of its own, and on_devices, where
    it has a form of its own between the devices of a node. hierarchical: what it does in nodes and between;
    hierarchical_on_devices: the same on arrays of devices.
    elementwise: a call may be done piece by piece, each a call on fewer elements, in place.
    """

    name: str
    messages: Callable[[Group, Call], Move]
    exchange: Callable[[Call, int, int], Exchange] | None = None
    on_node: Callable[[NodeContext, Call], NodeCollective] | None = None
    hierarchical: Callable[[Group, Call], Move] | None = None
    on_devices: Callable[[DeviceBoard, Open, Call], DeviceMove] | None = None
    hierarchical_on_devices: Callable[[DeviceBoard, Open, Group, Call], DeviceMove] | None = None
    elementwise: bool = False


class Path(Protocol):
    """One way on which data may go."""

    @property
    def name(self) -> str:
        """What users give as `algorithm=`."""
        ...

    @property
    def is_automatic(self) -> bool:
        """Whether "auto" may choose it."""
        ...

    @property
    def takes_devices(self) -> bool:
        """Whether it takes arrays of devices whose memory the transport accepts."""
        ...

    def refusal(self, group: Group, verb: Verb, call: Call) -> str:
        """Return why it cannot take a call, or "" if it can. The same on all ranks."""
        ...

    def compile(self, group: Group, verb: Verb, call: Call) -> Compiled:
        """Prepare a call that it can take. Not collective; the call is."""
        ...


def compile_call(paths: tuple[Path, ...], group: Group, verb: Verb, call: Call) -> Compiled:
    """Compile a call for the path that it names, else for the first that takes it; the last one takes all.

    Raises UsageError if it names a path that cannot take it, or an unknown algorithm.
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
