"""NodeContext: the parts of a group that its collectives within a node need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commlib.node.board import NodeBoard
from commlib.runtime.progress import Progress

Complete = Callable[[Any, int, Any, int, str], int]
"""Finishes a kernel that did not complete at once: (kernel, argument, calls, status, text) -> last status."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The board of a group's ranks on this node, the group's progress, and its callbacks for failures.

    group: keeps the group alive as long as its compiled calls, because its progress ends with it. places: the address
    of the table of the group's symmetric memory, for `kernels.host.call_routes`.
    """

    group: object
    board: NodeBoard
    progress: Progress
    places: int
    complete: Complete
    abandon: Callable[[str, BaseException], None]
