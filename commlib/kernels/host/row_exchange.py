"""Row exchange: compute the destinations of rows that ranks exchange by messages, as row numbers.

Places distinguish own rows from received ones: p >= 0 is the p-th received row, and p < 0 is row ~p of this rank, which
is not sent. Rows are sent to rank after rank, for each rank in the order of its experts, and for each expert by token.
Received rows of one rank have this order, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.kernels.host.compilation import kernel


@kernel(nogil=True)
def count_moved_rows(counts: Any, owners: Any, rank: int, sends: Any, takes: Any) -> None:
    """Write the row counts to and from each other rank. counts: of assignments, [ranks, experts]."""
    sends[:] = 0
    takes[:] = 0
    for expert in range(len(owners)):
        owner = owners[expert]
        if owner != rank:
            sends[owner] += counts[rank, expert]
        else:
            for source in range(len(takes)):
                if source != rank:
                    takes[source] += counts[source, expert]


@kernel(nogil=True)
def take_moved_rows(counts: Any, order: Any, owners: Any, rank: int, numbers: Any, sent: Any) -> None:
    """Write the numbers of this rank's assignments that go to other ranks, in the order of sending."""
    starts = np.zeros(len(owners) + 1, np.int64)
    for expert in range(len(owners)):
        starts[expert + 1] = starts[expert] + counts[rank, expert]
    at = 0
    for expert in order:
        if owners[expert] != rank:
            for i in range(starts[expert], starts[expert + 1]):
                sent[at] = numbers[i]
                at += 1


@kernel(nogil=True)
def write_places(
    counts: Any,
    order: Any,
    owners: Any,
    rank: int,
    tokens: Any,
    slots: Any,
    sent: Any,
    received: Any,
    returned: Any,
    positions: Any,
    members: Any,
) -> None:
    """Write the places of one call, all int32.

    tokens: the token of each assignment, expert by expert. slots: assignments, token by token. Written:

    sent      [rows to send] ~token of each
    received  [rows on this rank] the position of each among the received rows; ~token for a row of this rank
    returned  [received rows] ~row on this rank of each
    positions [assignments] the position of each among the sent rows; ~row on this rank for its own experts
    members   [assignments] the same, token by token
    """
    ranks, experts = counts.shape
    starts = np.zeros(experts + 1, np.int64)
    for expert in range(experts):
        starts[expert + 1] = starts[expert] + counts[rank, expert]
    at = 0
    for expert in order:
        if owners[expert] != rank:
            for i in range(starts[expert], starts[expert + 1]):
                sent[at] = ~tokens[i]
                positions[i] = at
                at += 1
    # Starts of the rows for each expert of this rank among all received rows.
    begins = np.zeros((ranks, experts), np.int64)
    at = 0
    for source in range(ranks):
        if source != rank:
            for expert in order:
                if owners[expert] == rank:
                    begins[source, expert] = at
                    at += counts[source, expert]
    row = 0
    for expert in order:
        if owners[expert] == rank:
            for source in range(ranks):
                for i in range(counts[source, expert]):
                    if source == rank:
                        received[row] = ~tokens[starts[expert] + i]
                        positions[starts[expert] + i] = ~row
                    else:
                        received[row] = begins[source, expert] + i
                        returned[begins[source, expert] + i] = ~row
                    row += 1
    for i in range(len(slots)):
        members[i] = positions[slots[i]]


@kernel(nogil=True)
def order_numbers(positions: Any, returned: Any, own: Any, received: Any, rows: Any) -> None:
    """Write the number of each row on this rank: of a received row, or of this rank's assignment."""
    for i in range(len(positions)):
        if positions[i] < 0:
            rows[~positions[i]] = own[i]
    for i in range(len(returned)):
        rows[~returned[i]] = received[i]
