"""Presence: tell which ranks of a group will never come, as far as a board of this node shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.node.board import NodeBoard


@dataclass(frozen=True, slots=True)
class Presence:
    """Read what a board tells of the ranks of a group: the group of the board, or a group split from that.

    ranks: the rank in the group of each of the board's members that is in it; None: the group is the board's own.
    """

    board: NodeBoard
    ranks: dict[int, int] | None = None

    def among(self, members: Sequence[int]) -> Presence:
        """Return the same for a group that was split from this one, by its members' ranks in this one."""
        inner = {member: rank for rank, member in enumerate(members)}
        if self.ranks is None:
            return Presence(self.board, inner)
        return Presence(self.board, {m: inner[rank] for m, rank in self.ranks.items() if rank in inner})

    def absent(self) -> dict[int, str]:
        """Return the ranks that will never come, each with the reason."""
        gone = self.board.absent()
        if self.ranks is None:
            return gone
        return {self.ranks[member]: reason for member, reason in gone.items() if member in self.ranks}

    def late(self) -> list[int]:
        """Return the ranks that have not reached this rank's meeting, where it is one on the board."""
        return self.board.late() if self.ranks is None else []
