"""Memberships: collect the process sets that the ranks have given, and compare them.

All ranks of the world give a set that is made of ranks, as it is. Only its members give a set that is made of a
communicator: a split gives each rank one communicator, and no rank has those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Ranks = tuple[int, ...]

Given = Sequence[tuple[Ranks, bool]]
"""The sets that one rank gives, in order, each with whether it is made of a communicator."""


def all_sets(everyone: Sequence[Given]) -> Iterator[Ranks]:
    """Yield the sets in the order in which they are numbered: by place in the lists, then by rank. Some repeatedly."""
    for place in range(max(map(len, everyone), default=0)):
        for given in everyone:
            if place < len(given):
                yield given[place][0]


def who_differs(everyone: Sequence[Given]) -> str:
    """Return which set is not given by a rank that must give it, or "" if all are."""
    for rank, given in enumerate(everyone):
        for members, is_comm in given:
            for other in members if is_comm else range(len(everyone)):
                if members not in [theirs for theirs, _ in everyone[other]]:
                    what = "a communicator" if is_comm else "a process set"
                    return f"rank {rank} gives {what} of the ranks {list(members)}, but rank {other} gives none of them"
    return ""
