"""Dispatch plan: the indices that send the tokens of one call to experts and back, used by every step.

It is one block of int32, so it can travel as a tensor from the graph node that makes it to the nodes that use it. See
`commlib.kernels.host.dispatch_plan` for its layout.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from commlib.dtypes import Array
from commlib.kernels.host.dispatch_plan import HEAD, block_length, write_block

DispatchPlan = Array


class Assignments(Protocol):
    """Assignment of tokens to experts: the part of a `commlib.expert.routing.Routing` that dispatchers use."""

    @property
    def tokens(self) -> Array:
        """The row of each assignment, int32: by expert, then in order."""
        ...

    @property
    def counts(self) -> Array:
        """Number of assignments of each expert, int64."""
        ...

    @property
    def starts(self) -> Array:
        """The start of each token's assignments in `slots`, int32, and their total."""
        ...

    @property
    def slots(self) -> Array:
        """Assignments by token, int32."""
        ...


def make_plan(assigned: Assignments, counts: Array, order: Array, owners: Array, rank: int, local: int) -> DispatchPlan:
    """Return the plan of this rank's tokens. counts: the rows of each rank for each expert (int64)."""
    ranks, experts = counts.shape
    tokens, starts = assigned.tokens, assigned.starts
    block = np.empty(block_length(len(tokens), len(starts) - 1, experts, ranks, local), np.int32)
    write_block(counts, order, owners, rank, tokens, starts, assigned.slots, block)
    return block


def tokens_of(plan: DispatchPlan) -> int:
    """Return the number of tokens of this rank."""
    return int(plan[1])


def rows_here(plan: DispatchPlan, rank: int) -> int:
    """Return the number of rows that this rank receives."""
    ranks, local = int(plan[3]), int(plan[4])
    return int(plan[len(plan) - local - ranks + rank])


def local_counts(plan: DispatchPlan) -> Any:
    """Return the number of rows of each expert of this rank."""
    return plan[len(plan) - int(plan[4]) :]


def assignments_of(plan: DispatchPlan) -> int:
    """Return the number of rows that this rank sends."""
    return int(plan[0])


def list_by_token(plan: DispatchPlan) -> tuple[Array, Array]:
    """Return the start of each token's assignments in the second array, and that array: assignments by token."""
    n, tokens = int(plan[0]), int(plan[1])
    begin = HEAD + n
    return plan[begin : begin + tokens + 1], plan[begin + tokens + 1 : begin + tokens + 1 + n]
