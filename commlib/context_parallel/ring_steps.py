"""Ring steps: blocks of queries and keys that a rank computes while keys and values travel around the ring. [pure]

In step t a rank has the keys and values of the rank t places before it. Its queries and those keys are split at the
boundaries of the layout and of documents. Two such pieces have the same positions or none in common. So a block is full
(each query sees each key), or causal on equal positions (a query sees its own position and those before), or empty.
A window adds bands: each query sees some of the keys, one position further than the query before.
Source: Liu et al., Ring Attention (2023); Brandon et al., Striped Attention (2023), for balance by order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from commlib.context_parallel.layout import SequenceLayout
from commlib.context_parallel.window import Window


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys that see each other, as spans of their ranks' shards.

    causal: both have the same positions, and a query sees the keys up to its own. band: the n-th query sees the keys
    from the n + band[0]-th to the n + band[1]-th, clipped to the block: at least one. Otherwise it sees all.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    band: tuple[int, int] | None = None

    @property
    def is_full(self) -> bool:
        """Whether each query sees each key."""
        return not self.causal and self.band is None

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that see each other."""
        height, width = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        if self.band is not None:
            low, high = self.band
            return sum(min(width, row + high + 1) - max(0, row + low) for row in range(height))
        return height * (height + 1) // 2 if self.causal else height * width


@dataclass(frozen=True, slots=True)
class RingStep:
    """The rank whose keys and values are used in a step, and the blocks computed with them; there may be none."""

    source: int
    blocks: tuple[Block, ...]


class _ShardPiece(NamedTuple):
    document: int
    positions: range
    at: int  # in the shard

    def span_of(self, positions: range) -> tuple[int, int]:
        start = self.at + positions.start - self.positions.start
        return start, start + len(positions)


_UNBOUNDED = Window()


@lru_cache(maxsize=256)  # layers ask for the same steps repeatedly
def steps(
    layout: SequenceLayout, rank: int, causal: bool, bounds: tuple[int, ...], window: Window = _UNBOUNDED
) -> tuple[RingStep, ...]:
    """Return a rank's work in each of `layout.size` steps. bounds: see `document_bounds`.

    Over all ranks and steps, each pair of positions that see each other occurs exactly once.
    """
    mine = _pieces(layout, rank, bounds)
    sources = [(rank - step) % layout.size for step in range(layout.size)]
    window = Window(window.left, 0) if causal else window
    return tuple(RingStep(source, _blocks(mine, _pieces(layout, source, bounds), window)) for source in sources)


def pairs(layout: SequenceLayout, causal: bool, bounds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return each rank's work in each step, as the number of pairs of positions that see each other."""
    return tuple(
        tuple(sum(block.pairs for block in step.blocks) for step in steps(layout, rank, causal, bounds))
        for rank in range(layout.size)
    )


def _pieces(layout: SequenceLayout, rank: int, bounds: tuple[int, ...]) -> list[_ShardPiece]:
    pieces, at = [], 0
    for positions in layout.ranges(rank):
        start = positions.start
        while start < positions.stop:
            document = bisect_right(bounds, start) - 1
            stop = min(positions.stop, bounds[document + 1])
            pieces.append(_ShardPiece(document, range(start, stop), at))
            at, start = at + stop - start, stop
    return pieces


def _blocks(queries: list[_ShardPiece], keys: list[_ShardPiece], window: Window) -> tuple[Block, ...]:
    of_document: dict[int, list[_ShardPiece]] = {}
    for piece in keys:
        of_document.setdefault(piece.document, []).append(piece)
    blocks = [
        _block(mine, theirs, *part, window)
        for mine in queries
        for theirs in of_document.get(mine.document, ())
        for part in window.parts(mine.positions, theirs.positions)
    ]
    return tuple(_join_queries(_join_keys(blocks)))


def _block(mine: _ShardPiece, theirs: _ShardPiece, queries: range, keys: range, is_full: bool, window: Window) -> Block:
    spans = mine.span_of(queries), theirs.span_of(keys)
    if is_full:
        return Block(*spans)
    if queries == keys and window.right == 0 and (window.left is None or window.left >= len(queries) - 1):
        return Block(*spans, causal=True)
    low = -len(queries) if window.left is None else queries.start - keys.start - window.left
    high = len(keys) if window.right is None else queries.start - keys.start + window.right
    return Block(*spans, band=(low, high))


def _join_keys(blocks: Iterable[Block]) -> Iterator[Block]:
    """Join full blocks of the same queries and of adjacent keys, to save calls and merges."""
    last: Block | None = None
    for block in blocks:
        if last and last.is_full and block.is_full and (last.queries, last.keys[1]) == (block.queries, block.keys[0]):
            last = Block(last.queries, (last.keys[0], block.keys[1]))
            continue
        if last:
            yield last
        last = block
    if last:
        yield last


def _join_queries(blocks: Iterable[Block]) -> Iterator[Block]:
    """Join full blocks of the same keys and of adjacent queries."""
    return map(_transpose, _join_keys(map(_transpose, blocks)))


def _transpose(block: Block) -> Block:
    return Block(block.keys, block.queries, block.causal, block.band)


def draw(layout: SequenceLayout, causal: bool, bounds: tuple[int, ...]) -> str:
    """Draw the steps: return a line for each rank, with its positions, and for each step "source: visible pairs"."""
    work = pairs(layout, causal, bounds)
    rows = []
    for rank in range(layout.size):
        held = ", ".join(f"{part.start}-{part.stop - 1}" for part in layout.ranges(rank)) or "none"
        cells = [
            f"{step.source}: {done}" for step, done in zip(steps(layout, rank, causal, bounds), work[rank], strict=True)
        ]
        rows.append([f"rank {rank}", held, *cells, str(sum(work[rank]))])
    head = ["", "positions", *(f"step {step}" for step in range(layout.size)), "pairs"]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )
