"""Liveness: the ranks of a group that have left or failed, as a board of this node shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.node.board import NodeBoard


@dataclass(frozen=True, slots=True)
class Liveness:
    """The liveness of a group's ranks, read from a board: the board of this group, or of a group it was split from.

    ranks: for each member of the board in the group, its rank in the group; None: the board belongs to this group.
    """

    board: NodeBoard
    ranks: dict[int, int] | None = None

    def among(self, members: Sequence[int]) -> Liveness:
        """Return the liveness of a group split from this one. members: the ranks of its members in this group."""
        inner = {member: rank for rank, member in enumerate(members)}
        if self.ranks is None:
            return Liveness(self.board, inner)
        return Liveness(self.board, {m: inner[rank] for m, rank in self.ranks.items() if rank in inner})

    def absent(self) -> dict[int, str]:
        """Return the ranks that will never arrive, each with the reason."""
        gone = self.board.absent()
        if self.ranks is None:
            return gone
        return {self.ranks[member]: reason for member, reason in gone.items() if member in self.ranks}

    def late(self) -> list[int]:
        """Return the ranks that have not reached this rank's epoch on the group's own board; else none."""
        return self.board.late() if self.ranks is None else []
