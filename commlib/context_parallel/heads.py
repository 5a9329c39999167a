"""Heads: those of queries, of keys and values, and how they are divided among ranks. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class Heads:
    """As many query heads, and key and value heads, each of which serves as many queries' (grouped queries).

    Divided among `size` ranks are units: a head of keys and values, or one of `copies` of it where a rank would have
    nothing to do or more than need be, and the queries that it serves.
    """

    queries: int
    keys: int
    size: int

    @classmethod
    def of(cls, what: str, q: Sequence[int], k: Sequence[int], v: Sequence[int], size: int) -> Heads:
        """Return those of tensors of these shapes: (batch, heads, tokens, head_dim). Raises UsageError."""
        given = f"{what}: q, k, v have shapes {list(q)}, {list(k)}, {list(v)}"
        if not len(q) == len(k) == len(v) == 4:
            raise UsageError(f"{given}: expected (batch, heads, tokens, head_dim)")
        if not (q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[2] == k[2]):
            raise UsageError(
                f"{given}: expected the same batch and, as each position has a query, a key and a value, the same "
                "tokens; and as many heads of k as of v"
            )
        if q[3] != k[3] or not q[3]:
            raise UsageError(f"{what}: q has head_dim {q[3]} and k {k[3]}, expected the same, at least 1")
        if not k[1] or not q[1] or q[1] % k[1]:
            raise UsageError(f"{what}: {q[1]} heads of q cannot be served by {k[1]} of k and v: expected a multiple")
        return cls(q[1], k[1], size)

    @property
    def copies(self) -> int:
        """How often each head of keys and values is sent: no more often than lets the busiest rank have less to do."""
        served = self.queries // self.keys
        divisors = [number for number in range(1, served + 1) if served % number == 0]
        return min(divisors, key=lambda copies: (-(-self.keys * copies // self.size) * (served // copies), copies))

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.keys * self.copies

    @property
    def served(self) -> int:
        """How many heads of queries a unit has."""
        return self.queries // self.units

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many units each rank has: none, if there are fewer heads than ranks."""
        return even(self.units, self.size).counts
