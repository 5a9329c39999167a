"""Window: number of positions that a query sees to its left and right. [pure]"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import NamedTuple

from commlib.errors import UsageError

ROWS = 128
"""Minimum number of queries of a block within a window: fewer would make many small products."""


class Window(NamedTuple):
    """Number of positions that a query sees on either side of its own; None: all of them."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, what: str, given: object, causal: bool) -> Window:
        """Return the window of an argument: None, or a pair (left, right), each None or -1 for all. Raises UsageError.

        causal: nothing to the right is seen, whatever the argument.
        """
        pair = (None, None) if given is None else given
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_reach, pair)):
            raise UsageError(
                f"{what}: window is {given!r}, expected (left, right): how many positions a token sees before and "
                "after its own, -1 for all; a sliding window of 4096 tokens, itself included, is (4095, 0)"
            )
        left, right = (None if reach in (None, -1) else int(reach) for reach in pair)
        return cls(left, 0 if causal else right)

    def parts(self, queries: range, keys: range) -> Iterator[tuple[range, range, bool]]:
        """Yield queries and keys that see each other, and whether each of these queries sees each of these keys.

        Each pair that sees each other is in exactly one part, and each query of a part sees at least one of its keys.
        """
        if self.left is None or self.right is None:
            rows = max(len(queries), 1)
        else:
            rows = max(ROWS, (self.left + self.right + 1) // 2)
        for start in range(queries.start, queries.stop, rows):
            yield from self._parts(range(start, min(start + rows, queries.stop)), keys)

    def _parts(self, queries: range, keys: range) -> Iterator[tuple[range, range, bool]]:
        rows, visible = self._visible(queries, keys)
        if not rows:
            return
        first = visible.start if self.left is None else max(visible.start, rows.stop - 1 - self.left)
        last = visible.stop if self.right is None else min(visible.stop, rows.start + self.right + 1)
        if first >= last:  # no key is seen by all queries
            yield rows, visible, False
            return
        if self.right == 0 and visible.stop == rows.stop and last == rows.start + 1:
            last = rows.start  # the rest is causal, with equal positions
        for part, whole in (
            (range(visible.start, first), False),
            (range(first, last), True),
            (range(last, visible.stop), False),
        ):
            if part:
                yield (*self._visible(rows, part), whole)

    def _visible(self, queries: range, keys: range) -> tuple[range, range]:
        """Return the queries that see some of the keys, and the keys that some of these queries see."""
        if not queries or not keys:
            return range(0), range(0)
        first = queries.start if self.right is None else max(queries.start, keys.start - self.right)
        last = queries.stop if self.left is None else min(queries.stop, keys.stop + self.left)
        if first >= last:
            return range(0), range(0)
        start = keys.start if self.left is None else max(keys.start, first - self.left)
        stop = keys.stop if self.right is None else min(keys.stop, last + self.right)
        return range(first, last), range(start, stop)


def _is_reach(value: object) -> bool:
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= -1)
