"""NodeContext: give the collectives of a node the parts of their group that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commlib.node.board import NodeBoard
from commlib.runtime.progress import Progress

Complete = Callable[[Any, int, Any, int, str], int]
"""Finish a kernel that did not end well at once: (kernel, its argument, its calls, its status, text) to a status."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Hold the board of a group's ranks on this node, the order of the group's operations, and its trouble reports.

    places: the address of the places of the group's symmetric memory, as `kernels.host.placed` reads them.
    """

    board: NodeBoard
    progress: Progress
    places: int
    complete: Complete
    abandon: Callable[[str, BaseException], None]
