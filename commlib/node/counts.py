"""Counts: say which ranks of an all_to_all_v do not agree on how many rows go from one to the other."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.errors import MismatchError, UsageError


def unequal(
    group: str, rank: int, came: Sequence[int], takes: Sequence[int], splits: Sequence[int], expected: Sequence[int]
) -> MismatchError:
    """Return the error of counts that differ: what came from each rank and was to come, went to each and was to go."""
    lines = [
        f"  rank {peer} sent {_rows(here)} to rank {rank}, which expected {there}"
        for peer, (here, there) in enumerate(zip(came, takes, strict=True))
        if here != there
    ]
    lines += [
        f"  rank {rank} sent {_rows(here)} to rank {peer}, which expected {there}"
        for peer, (here, there) in enumerate(zip(splits, expected, strict=True))
        if here != there and peer != rank
    ]
    return MismatchError(
        f"{group}: all_to_all_v: the ranks do not agree on how much they exchange (this is rank {rank}):\n"
        + "\n".join(lines)
        + "\ntakes= must be what the other ranks give in splits=. The group stays usable."
    )


def unfit(group: str, rank: int, came: Sequence[int], room: int) -> UsageError:
    """Return the error of a result that has another length than what has come."""
    return UsageError(
        f"{group}: all_to_all_v: {sum(came)} rows came to rank {rank}, {list(came)} from ranks 0, 1, ..., but out has "
        f"{room}; the other ranks have their data"
    )


def _rows(count: int) -> str:
    return "more rows" if count < 0 else f"{count} row{'s' if count != 1 else ''}"
