"""Compare the parameters of all ranks once, before their gradients are added up."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from commlib.errors import MismatchError


class GatherRanks(Protocol):
    """The part of a communicator that this module needs. Ranks that have joined may be missing from gathered lists."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...


def check_agreement(
    comm: GatherRanks, what: str, lines: Sequence[str], *, counted: Sequence[str] = (), remedy: str = ""
) -> None:
    """Compare `lines` with those of the other ranks, then `counted`. Collective.

    counted: lines with numbered names, where a framework may start from another number on each rank: see `renumber`.
    If lines differ in that alone, they count as equal and the first rank warns, because such names do not prove that
    ranks mean the same parameters. Ranks exchange only a digest unless they differ. Raises MismatchError on every rank,
    with the first line that differs, and with the `remedy` if only some ranks have a line.
    """
    if comm.size == 1:
        return
    mine = [*lines, *counted]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    everyone: list[tuple[int, list[str], int]] = comm.all_gather_object((comm.rank, mine, len(lines)))
    difference, is_lacking = _first_difference([(rank, own) for rank, own, _ in everyone])
    alike = [(same, own[:same], renumber(own[same:])) for _, own, same in everyone]
    if all(one == alike[0] for one in alike):
        if comm.rank == everyone[0][0]:
            warnings.warn(
                f"{what}: {difference}: treated as equal, because a rank that made other layers earlier counts from "
                "another number. If ranks mean different parameters, for example if each freezes others, give them "
                "names",
                stacklevel=2,
            )
        return
    after = f": {remedy}" if remedy and is_lacking else ""
    raise MismatchError(f"{what}: {difference} (this is rank {comm.rank} of {comm.size}){after}")


def renumber(lines: Sequence[str]) -> list[str]:
    """Renumber names from the first of each kind: dense_7/kernel becomes dense_0/kernel.

    Keras counts the layers that a process has made. A process that made other layers earlier starts from another
    number. Differences in the order of names, or in the gaps between their numbers, remain.
    """
    first = dict[str, int]()

    def counted(match: re.Match[str]) -> str:
        number = int(match[2] or 0)
        return f"{match[1]}_{number - first.setdefault(match[1], number)}"

    return [re.sub(r"\b([A-Za-z]\w*?)(?:_(\d+))?(?!\w)", counted, line) for line in lines]


def check_missing(
    comm: GatherRanks, names: Sequence[str], mine: frozenset[int] | None, *, gave_up: bool = False, late: str = ""
) -> bool:
    """Exchange which gradients are missing on each rank; return whether the backward is valid. Collective.

    mine: the numbers of the gradients that this rank lacks; None if it has joined. gave_up: its backward raised, so it
    has no gradients. late: the gradient that makes this rank reduce once more, because it was set after the backward.
    Raises MismatchError, except on ranks that gave up or have joined, if any rank gave up, if only some reduce once
    more, or if ranks lack different gradients.
    """
    everyone: list[tuple[int, frozenset[int] | None, bool, str]] = comm.all_gather_object(
        (comm.rank, mine, gave_up, late)
    )
    this = f"this is rank {comm.rank} of {comm.size}"
    if away := [rank for rank, _, stopped, _ in everyone if stopped]:
        if gave_up or mine is None:
            return False
        raise MismatchError(
            f"an exception ended the backward of ranks {away}, which caught it and continued, so gradients lack their "
            f"part ({this}): catch MismatchError here, too, call zero_grad() and continue with the next step as they do"
        )
    again = {rank: name for rank, theirs, _, name in everyone if theirs is not None and name}
    if again and (others := [rank for rank, theirs, _, name in everyone if theirs is not None and not name]):
        if mine is None:
            return False
        raise MismatchError(
            f"the gradient of {next(iter(again.values()))} was put into .grad by hand on ranks {list(again)} after a "
            f"backward had reduced those of its step, but not on ranks {others} ({this}): put it in on all ranks, with "
            "zeros on ranks without one, or before the backward"
        )
    lacking = [(rank, theirs) for rank, theirs, _, _ in everyone if theirs is not None]
    for index in sorted(frozenset().union(*(theirs for _, theirs in lacking))):
        without = [rank for rank, theirs in lacking if index in theirs]
        there = [rank for rank, theirs in lacking if index not in theirs]
        if there:
            if mine is None:
                return False
            raise MismatchError(
                f"the gradient of {names[index]} is None on ranks {without}, but not on ranks {there} ({this}): set a "
                "gradient of zeros on those ranks, or pass sparse_as_dense=True if it is sparse"
            )
    return True


def _first_difference(everyone: Sequence[tuple[int, Sequence[str]]]) -> tuple[str, bool]:
    """Return the first difference, and whether it is a line that only some ranks have."""
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
