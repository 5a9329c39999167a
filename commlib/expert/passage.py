"""Passage: how the tokens of one call go to experts and come back, in numbers that every step of it needs.

It is one block of int32, so that it can travel as a tensor from the node of a graph that makes it to those that use it:
see `commlib.kernels.host.segments` for what is in it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from commlib.dtypes import Array
from commlib.kernels.host.segments import HEAD, block_length, write_block

Passage = Array


class Assigned(Protocol):
    """Which tokens go to which experts: what an exchange needs of a `commlib.expert.routing.Routing`."""

    @property
    def tokens(self) -> Array:
        """The row of each assignment, int32: expert by expert, within an expert in order."""
        ...

    @property
    def counts(self) -> Array:
        """How many there are for each expert, int64."""
        ...

    @property
    def starts(self) -> Array:
        """Where those of each token begin in `slots`, int32, and how many there are in all."""
        ...

    @property
    def slots(self) -> Array:
        """Assignments by token, int32."""
        ...


def passage_of(assigned: Assigned, counts: Array, order: Array, owners: Array, rank: int, local: int) -> Passage:
    """Return the passage of this rank's tokens, by how many rows each rank has for each expert (int64)."""
    ranks, experts = counts.shape
    tokens, starts = assigned.tokens, assigned.starts
    block = np.empty(block_length(len(tokens), len(starts) - 1, experts, ranks, local), np.int32)
    write_block(counts, order, owners, rank, tokens, starts, assigned.slots, block)
    return block


def tokens_of(passage: Passage) -> int:
    """Return how many tokens this rank has."""
    return int(passage[1])


def rows_here(passage: Passage, rank: int) -> int:
    """Return how many rows this rank gets."""
    ranks, local = int(passage[3]), int(passage[4])
    return int(passage[len(passage) - local - ranks + rank])


def local_counts(passage: Passage) -> Any:
    """Return how many rows each expert of this rank gets."""
    return passage[len(passage) - int(passage[4]) :]


def assignments_of(passage: Passage) -> int:
    """Return how many rows this rank sends."""
    return int(passage[0])


def by_token(passage: Passage) -> tuple[Array, Array]:
    """Return where the assignments of each token begin in the second array, which has them token by token."""
    n, tokens = int(passage[0]), int(passage[1])
    begin = HEAD + n
    return passage[begin : begin + tokens + 1], passage[begin + tokens + 1 : begin + tokens + 1 + n]
