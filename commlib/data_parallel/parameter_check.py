"""Compare the parameters of all ranks once, instead of summing apples and pears."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from commlib.errors import MismatchError


class Gathers(Protocol):
    """A communicator, as far as it is needed here. Ranks that have joined may be missing from what it gathers."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...


def check_agreement(comm: Gathers, what: str, lines: Sequence[str]) -> None:
    """Compare `lines` with those of the other ranks. Collective.

    Only a digest travels while all is well. Raises MismatchError on every rank, with the first line that differs.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    everyone: list[tuple[int, list[str]]] = comm.all_gather_object((comm.rank, list(lines)))
    raise MismatchError(f"{what}: {_first_difference(everyone)} (this is rank {comm.rank} of {comm.size})")


def check_missing(comm: Gathers, names: Sequence[str], mine: frozenset[int]) -> None:
    """Raise MismatchError unless all ranks that have not joined lack the same gradients, by number. Collective."""
    everyone: list[tuple[int, frozenset[int]]] = comm.all_gather_object((comm.rank, mine))
    for index in sorted(mine.union(*(theirs for _, theirs in everyone))):
        without = [rank for rank, theirs in everyone if index in theirs]
        there = [rank for rank, theirs in everyone if index not in theirs]
        if there:
            raise MismatchError(
                f"the gradient of {names[index]} is None on ranks {without}, but not on ranks {there} (this is rank "
                f"{comm.rank} of {comm.size}): give zeros where there is none, or sparse_as_dense=True if it is sparse"
            )


def _first_difference(everyone: Sequence[tuple[int, Sequence[str]]]) -> str:
    first, reference = everyone[0]
    other, lines = next((rank, lines) for rank, lines in everyone if lines != reference)
    for position, (expected, got) in enumerate(zip(reference, lines, strict=False)):
        if expected != got:
            return f"entry {position} is {expected!r} on rank {first} but {got!r} on rank {other}"
    longer, extra = (first, reference[len(lines)]) if len(reference) > len(lines) else (other, lines[len(reference)])
    counts = f"rank {first} has {len(reference)} entries and rank {other} has {len(lines)}"
    return f"{counts}: {extra!r} is only on rank {longer}"
