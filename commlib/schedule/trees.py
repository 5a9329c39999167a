"""Trees, and flows of data up and down them in a pipeline of segments.

`reduce_up` and `send_down` assign each of their rounds a tick, the same at both ends of a message, as if all ranks ran
in lock step: a segment leaves the deepest leaves first and climbs one level per tick; from the root it descends one
level per tick. `overlay` joins the rounds of one tick. Both ends of every message have the same tick and ticks run in
order, so no overlay of any number of flows can deadlock, and the transfers of the two flows overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined

from commlib.schedule.ir import Recv, Round, Send, Span
from commlib.schedule.spans import circular, floor_log2

Timed = tuple[int, Round]


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's position in a tree. `children` are in the order in which their sums are added."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    height: int


def binomial(rank: int, size: int, root: int = 0) -> Tree:
    """Return the binomial tree: relative to the root, the parent of v is v without its lowest bit."""
    place = (rank - root) % size
    low = place & -place or size
    children = []
    bit = 1
    while bit < low and place + bit < size:
        children.append((rank + bit) % size)
        bit *= 2
    parent = (rank - low) % size if place else None
    return Tree(parent, tuple(children), place.bit_count(), floor_log2(size))


def subtree_chunks(rank: int, size: int, root: int = 0) -> tuple[Span, ...]:
    """Return the chunks of a rank's subtree in the binomial tree, including its own."""
    place = (rank - root) % size
    low = place & -place or size
    return circular(rank, min(low, size - place), size)


def chain(rank: int, size: int, root: int = 0) -> Tree:
    """Return the tree without branches: root, root + 1, ..., modulo size."""
    place = (rank - root) % size
    parent = (rank - 1) % size if place else None
    children = ((rank + 1) % size,) if place + 1 < size else ()
    return Tree(parent, children, place, size - 1)


def in_order(rank: int, size: int, first: int = 0) -> Tree:
    """Return the binary tree whose in-order walk is first, first + 1, ...: every second rank is a leaf.

    Positions count from 1; the level of a position is its number of trailing zero bits. If a parent would be beyond the
    last position, the next ancestor replaces it.
    """
    place = (rank - first) % size + 1
    low = place & -place

    def climb(node: int) -> int:
        bit = node & -node
        node = (node ^ bit) | bit << 1
        return node if node <= size else climb(node)

    def at(node: int) -> int:
        return (node - 1 + first) % size

    root = 1 << floor_log2(size)
    depth, node = 0, place
    while node != root:
        depth, node = depth + 1, climb(node)
    children = [at(place - low // 2)] if low > 1 else []
    reach = low // 2
    while reach and place + reach > size:
        reach //= 2
    if reach:
        children.append(at(place + reach))
    return Tree(at(climb(place)) if depth else None, tuple(children), depth, floor_log2(size))


def reduce_up(tree: Tree, segments: Sequence[Span]) -> Iterator[Timed]:
    """Sum every segment towards the root."""
    for tick, span in enumerate(segments, tree.height - tree.depth):
        if tree.children:
            yield tick - 1, Round(recvs=tuple(Recv(child, span, reduce=True) for child in tree.children))
        if tree.parent is not None:
            yield tick, Round(sends=(Send(tree.parent, span),))


def send_down(tree: Tree, segments: Sequence[Span]) -> Iterator[Timed]:
    """Forward every segment from the root to all; the child with the largest subtree, the last, is first."""
    for tick, span in enumerate(segments, tree.height + tree.depth):
        if tree.parent is not None:
            yield tick - 1, Round(recvs=(Recv(tree.parent, span),))
        if tree.children:
            yield tick, Round(sends=tuple(Send(child, span) for child in reversed(tree.children)))


def overlay(*flows: Iterable[Timed]) -> Iterator[Round]:
    """Join the rounds of each tick; skip empty ticks."""
    ticks: defaultdict[int, list[Round]] = defaultdict(list)
    for tick, step in joined(*flows):
        ticks[tick].append(step)
    for _, steps in sorted(ticks.items()):
        sends = tuple(send for step in steps for send in step.sends)
        recvs = tuple(recv for step in steps for recv in step.recvs)
        yield Round(sends, recvs)
