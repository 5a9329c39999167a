"""Travel: where each row goes that ranks exchange by messages, and where it comes to, as numbers of rows.

Places tell rows of this rank from those that came: p >= 0 is the p-th row that came, ~p (which is negative) the p-th of
this rank's own, which do not travel. Rows go to rank after rank, for each in the order of its experts, of one expert by
token; so those that come from one rank lie in that order, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.kernels.host.compiled import kernel


@kernel(nogil=True)
def count_travellers(counts: Any, owners: Any, rank: int, sends: Any, takes: Any) -> None:
    """Write how many rows go to each rank, and come from it, but its own. counts: of assignments, [ranks, experts]."""
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
def take_travellers(counts: Any, order: Any, owners: Any, rank: int, numbers: Any, sent: Any) -> None:
    """Write the numbers of this rank's assignments that go to others, in the order in which they go."""
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
    came: Any,
    returned: Any,
    found: Any,
    members: Any,
) -> None:
    """Write the places of one call, all int32.

    tokens: the token of each assignment, expert by expert. slots: assignments, token by token. Written:

    sent      [rows that go] the token of each, ~
    came      [rows here] where each is among those that came, or the token of this rank that it is, ~
    returned  [rows that come] which row here each is, ~
    found     [assignments] where each is among the rows that come back, or which row here it is, ~
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
                found[i] = at
                at += 1
    # Where what comes for each expert of this rank begins among all that comes.
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
                        came[row] = ~tokens[starts[expert] + i]
                        found[starts[expert] + i] = ~row
                    else:
                        came[row] = begins[source, expert] + i
                        returned[begins[source, expert] + i] = ~row
                    row += 1
    for i in range(len(slots)):
        members[i] = found[slots[i]]


@kernel(nogil=True)
def order_numbers(found: Any, returned: Any, own: Any, came: Any, rows: Any) -> None:
    """Write the number of each row here: one of those that came, or of this rank's assignments."""
    for i in range(len(found)):
        if found[i] < 0:
            rows[~found[i]] = own[i]
    for i in range(len(returned)):
        rows[~returned[i]] = came[i]
