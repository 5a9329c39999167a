"""Subgroups: communicators made from the ranks of another communicator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from commlib.errors import UsageError
from commlib.group.arguments import integer
from commlib.group.group import Group
from commlib.group.operation import Operation
from commlib.transport.base import Transport


class ClosableComm(Protocol):
    """A communicator."""

    def close(self) -> None: ...


C = TypeVar("C", bound=ClosableComm)


@dataclass(frozen=True, slots=True)
class NodeAndRail(Generic[C]):
    """This rank's node, its rail, and its index in the node, which is also the number of its rail if it has one."""

    node: C
    rail: C | None
    place: int


class Subgroups(Generic[C]):
    """The subgroups of one group. make: makes a communicator from a group."""

    def __init__(self, group: Group, make: Callable[[Group], C]) -> None:
        self._group, self._make = group, make
        self._numbers = itertools.count(1)
        self._node: C | None = None
        self._parts: NodeAndRail[C] | None = None

    def split(self, requests: Sequence[tuple[int, int, str]]) -> list[C | None]:
        """Return the communicators of several splits: see `Communicator.split_all`. Collective."""
        for color, key, _ in requests:
            for what, value in (("color", color), ("key", key)):
                if not -(2**31) <= integer("split", what, value) < 2**31:
                    raise UsageError(f"split: {what} is {value}, expected a 32-bit integer")

        def run() -> list[C | None]:
            numbers = [next(self._numbers) for _ in requests]  # the same on all ranks, even after calls that differed
            self._group.runtime.retired.free(self._group.programs.gather_objects)  # now that all ranks have arrived
            return [self._child(*request, number) for request, number in zip(requests, numbers, strict=True)]

        text = ", ".join(["split", *(name for _, _, name in requests if name)])
        return self._group.run(Operation(text, run, must_match=True))  # type: ignore[no-any-return]

    def _child(self, color: int, key: int, name: str, number: int) -> C | None:
        group = self._group
        transport = group.transport.split(color, key)
        if transport is None:
            return None
        unique = f"split{number}({color})"
        return self._make(group.child(transport, name or f"{group.name}.{unique}", f"{group.key}.{unique}"))

    def node(self) -> C:
        """Return the communicator of the ranks on this node. The first call is collective."""
        if self._node is None:
            group = self._group
            run = partial(self._child, group.topology.node(group.rank), group.rank, f"{group.name}.node", 0)
            self._node = group.run(Operation("node", run, must_match=True))
        assert self._node is not None
        return self._node

    def parts(self) -> NodeAndRail[C]:
        """Return private communicators of this rank's node and rail. Not collective."""
        if self._parts is None:
            hierarchy = self._group.hierarchy
            rail = None if hierarchy.rail is None else self._private(hierarchy.rail, "rail")
            self._parts = NodeAndRail(self._private(hierarchy.node, "node"), rail, hierarchy.place)
        return self._parts

    def inner(self) -> C:
        """Return a private communicator of the same ranks. Not collective."""
        return self._private(self._group.transport, "inner")

    def _private(self, transport: Transport, name: str) -> C:
        return self._make(self._group.child(transport, f"{self._group.name}.{name}", private=True))

    def close(self) -> None:
        """Close the communicators of `node` and `parts`."""
        if self._node is not None:
            self._node.close()
        if self._parts is not None:
            self._parts.node.close()
            if self._parts.rail is not None:
                self._parts.rail.close()
