"""Memberships: collect the process sets that the ranks pass, and compare them.

All ranks of the world pass a set that is made from ranks. Only its members pass a set that is made from a communicator:
a split returns one communicator to each rank, and no rank has those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Members = tuple[int, ...]

Given = Sequence[tuple[Members, bool]]
"""The sets of one rank, in order, each with a flag: made from a communicator."""


def all_sets(everyone: Sequence[Given]) -> Iterator[Members]:
    """Yield the sets in the order of their numbers: by index in the lists, then by rank. Some repeatedly."""
    for place in range(max(map(len, everyone), default=0)):
        for given in everyone:
            if place < len(given):
                yield given[place][0]


def find_difference(everyone: Sequence[Given]) -> str:
    """Return an error text for a set that some rank fails to pass, or "" if the ranks agree."""
    for rank, given in enumerate(everyone):
        for members, is_comm in given:
            for other in members if is_comm else range(len(everyone)):
                if members not in [theirs for theirs, _ in everyone[other]]:
                    what = "a communicator" if is_comm else "a process set"
                    return f"rank {rank} passes {what} of the ranks {list(members)}, but rank {other} does not"
    return ""
