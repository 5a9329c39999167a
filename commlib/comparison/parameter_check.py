"""Compare the parameters of all ranks once, instead of summing apples and pears."""

from __future__ import annotations

import hashlib
import re
import warnings
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


def check_agreement(
    comm: Gathers, what: str, lines: Sequence[str], *, counted: Sequence[str] = (), remedy: str = ""
) -> None:
    """Compare `lines` with those of the other ranks, and `counted` behind them. Collective.

    counted: lines with names that a framework may count from other numbers on other ranks: see `from_first`. Those that
    differ in that alone are taken for the same, which the first rank warns of: names do not tell whether ranks mean the
    same ones. Only a digest travels while all is well. Raises MismatchError on every rank, with the first line that
    differs, and the `remedy` where some ranks have a line and others have not.
    """
    if comm.size == 1:
        return
    mine = [*lines, *counted]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    everyone: list[tuple[int, list[str], int]] = comm.all_gather_object((comm.rank, mine, len(lines)))
    difference, is_lacking = _first_difference([(rank, own) for rank, own, _ in everyone])
    alike = [(same, own[:same], from_first(own[same:])) for _, own, same in everyone]
    if all(one == alike[0] for one in alike):
        if comm.rank == everyone[0][0]:
            warnings.warn(
                f"{what}: {difference}: taken for the same, as where a rank has made other layers before, so that they "
                "count from another number. If ranks mean different ones, as where each freezes others, name them",
                stacklevel=2,
            )
        return
    after = f": {remedy}" if remedy and is_lacking else ""
    raise MismatchError(f"{what}: {difference} (this is rank {comm.rank} of {comm.size}){after}")


def from_first(lines: Sequence[str]) -> list[str]:
    """Return lines in which names are counted from the first of each kind: dense_7/kernel as dense_0/kernel.

    Keras counts the layers that a process has made, and one that has made others before begins with another number.
    What differs in their order, or in how many there are between two, differs still.
    """
    first = dict[str, int]()

    def counted(found: re.Match[str]) -> str:
        number = int(found[2] or 0)
        return f"{found[1]}_{number - first.setdefault(found[1], number)}"

    return [re.sub(r"\b([A-Za-z]\w*?)(?:_(\d+))?(?!\w)", counted, line) for line in lines]


def check_missing(
    comm: Gathers, names: Sequence[str], mine: frozenset[int] | None, *, gave_up: bool = False, late: str = ""
) -> bool:
    """Hear what is wrong with gradients on some rank; return whether the backward counts all the same. Collective.

    mine: the gradients that this rank lacks, by number; None if it has joined. gave_up: its own backward raised, and
    what it gives are no gradients. late: a gradient that this rank reduces once more for, because it came after those
    of its backward. Raises MismatchError, but on ranks that gave up or have joined, if any rank gave up, if some reduce
    once more and others do not, or if some lack other gradients than others.
    """
    everyone: list[tuple[int, frozenset[int] | None, bool, str]] = comm.all_gather_object(
        (comm.rank, mine, gave_up, late)
    )
    this = f"this is rank {comm.rank} of {comm.size}"
    if away := [rank for rank, _, gone, _ in everyone if gone]:
        if gave_up or mine is None:
            return False
        raise MismatchError(
            f"an exception ended the backward of ranks {away}, which caught it and went on, so gradients lack their "
            f"part ({this}): catch this here, too, call zero_grad() and go on with the next step as they do"
        )
    again = {rank: name for rank, theirs, _, name in everyone if theirs is not None and name}
    if again and (others := [rank for rank, theirs, _, name in everyone if theirs is not None and not name]):
        if mine is None:
            return False
        raise MismatchError(
            f"the gradient of {next(iter(again.values()))} was put into .grad by hand, after a backward had reduced "
            f"those of its step, on ranks {list(again)}, but not on ranks {others} ({this}): put it in on all ranks, "
            "zeros where there is none, or before the backward"
        )
    lacking = [(rank, theirs) for rank, theirs, _, _ in everyone if theirs is not None]
    for index in sorted(frozenset().union(*(theirs for _, theirs in lacking))):
        without = [rank for rank, theirs in lacking if index in theirs]
        there = [rank for rank, theirs in lacking if index not in theirs]
        if there:
            if mine is None:
                return False
            raise MismatchError(
                f"the gradient of {names[index]} is None on ranks {without}, but not on ranks {there} ({this}): give "
                "zeros where there is none, or sparse_as_dense=True if it is sparse"
            )
    return True


def _first_difference(everyone: Sequence[tuple[int, Sequence[str]]]) -> tuple[str, bool]:
    """Return what differs first, and whether it is a line that some ranks have, and others have not."""
    first, reference = everyone[0]
    other, lines = next((rank, lines) for rank, lines in everyone if lines != reference)
    for position, (expected, got) in enumerate(zip(reference, lines, strict=False)):
        if expected == got:
            continue
        if len(alone := [line for line, others in ((expected, lines), (got, reference)) if line not in others]) == 1:
            there = [rank for rank, own in everyone if alone[0] in own]
            without = [rank for rank, own in everyone if alone[0] not in own]
            return f"{alone[0]!r} is on ranks {there}, but not on ranks {without}", True
        return f"entry {position} is {expected!r} on rank {first} but {got!r} on rank {other}", False
    longer, extra = (first, reference[len(lines)]) if len(reference) > len(lines) else (other, lines[len(reference)])
    counts = f"rank {first} has {len(reference)} entries and rank {other} has {len(lines)}"
    return f"{counts}: {extra!r} is only on rank {longer}", True
