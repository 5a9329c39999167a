"""All ranks must hold the same parameters in the same order: check it once, instead of summing apples and pears."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from commlib.errors import MismatchError


class Gathers(Protocol):
    """What is needed of a communicator."""

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
    theirs: list[list[str]] = comm.all_gather_object(list(lines))
    raise MismatchError(f"{what}: {_first_difference(theirs)} (this is rank {comm.rank} of {comm.size})")


def _first_difference(everyone: Sequence[Sequence[str]]) -> str:
    reference = everyone[0]
    other = next(rank for rank, lines in enumerate(everyone) if list(lines) != list(reference))
    lines = everyone[other]
    for position, (expected, got) in enumerate(zip(reference, lines, strict=False)):
        if expected != got:
            return f"entry {position} is {expected!r} on rank 0 but {got!r} on rank {other}"
    longer, extra = (0, reference[len(lines)]) if len(reference) > len(lines) else (other, lines[len(reference)])
    return f"rank 0 has {len(reference)} entries and rank {other} has {len(lines)}: {extra!r} is only on rank {longer}"
