"""Heads: heads of queries, and of keys and values, split among ranks. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads, and of key and value heads, which each serve as many query heads (grouped queries).

    The units that `size` ranks split are a head of keys and values with the queries that it serves, or one of `copies`
    of that head, if copies reduce the work of the busiest rank.
    """

    queries: int
    keys: int
    size: int

    @classmethod
    def of(cls, what: str, q: Sequence[int], k: Sequence[int], v: Sequence[int], size: int) -> Heads:
        """Return the heads of tensors of these shapes: (batch, heads, tokens, head_dim). Raises UsageError."""
        given = f"{what}: q, k, v have shapes {list(q)}, {list(k)}, {list(v)}"
        if not len(q) == len(k) == len(v) == 4:
            raise UsageError(f"{given}: expected (batch, heads, tokens, head_dim)")
        if not (q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[2] == k[2]):
            raise UsageError(
                f"{given}: expected the same batch, the same tokens (each position has a query, a key and a value), "
                "and equally many heads of k and v"
            )
        if q[3] != k[3] or not q[3]:
            raise UsageError(f"{what}: q has head_dim {q[3]} and k {k[3]}, expected the same, at least 1")
        if not k[1] or not q[1] or q[1] % k[1]:
            raise UsageError(f"{what}: {q[1]} heads of q are no multiple of {k[1]} heads of k and v")
        return cls(q[1], k[1], size)

    @property
    def copies(self) -> int:
        """Copies sent of each head of keys and values: the fewest that minimise the work of the busiest rank."""
        served = self.queries // self.keys
        divisors = [number for number in range(1, served + 1) if served % number == 0]
        return min(divisors, key=lambda copies: (-(-self.keys * copies // self.size) * (served // copies), copies))

    @property
    def units(self) -> int:
        """Number of units."""
        return self.keys * self.copies

    @property
    def served(self) -> int:
        """Number of query heads of a unit."""
        return self.queries // self.units

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of units of each rank: 0 on some ranks if there are fewer heads than ranks."""
        return even(self.units, self.size).counts
