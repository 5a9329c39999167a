"""Counts: the errors of all_to_all_v for ranks that disagree on row counts."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.errors import MismatchError, UsageError


def make_counts_error(
    group: str, rank: int, received: Sequence[int], takes: Sequence[int], splits: Sequence[int], expected: Sequence[int]
) -> MismatchError:
    """Return the error for different counts: rows received and expected per rank, sent and expected there."""
    lines = [
        f"  rank {peer} sent {_rows(here)} to rank {rank}, which expected {there}"
        for peer, (here, there) in enumerate(zip(received, takes, strict=True))
        if here != there
    ]
    lines += [
        f"  rank {rank} sent {_rows(here)} to rank {peer}, which expected {there}"
        for peer, (here, there) in enumerate(zip(splits, expected, strict=True))
        if here != there and peer != rank
    ]
    return MismatchError(
        f"{group}: all_to_all_v: the ranks do not agree on the numbers of rows (this is rank {rank}):\n"
        + "\n".join(lines)
        + "\ntakes= must equal the splits= of the other ranks. The group stays usable."
    )


def make_length_error(group: str, rank: int, received: Sequence[int], room: int) -> UsageError:
    """Return the error for a result array whose length differs from the number of received rows."""
    return UsageError(
        f"{group}: all_to_all_v: rank {rank} received {sum(received)} rows, {list(received)} from ranks 0, 1, ..., "
        f"but out has {room}; the other ranks have their data"
    )


def _rows(count: int) -> str:
    return "more rows" if count < 0 else f"{count} row{'s' if count != 1 else ''}"
