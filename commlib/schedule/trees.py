"""Trees, and data flowing up and down them in a pipeline of segments.

`up` and `down` give each of their rounds a time, the same at both ends of a message, as if all ranks kept step:
a segment leaves the deepest leaves first and climbs one level a tick; once the root has it, it falls one level a
tick. `overlay` joins the rounds of one tick. As both ends of every message stand at the same tick and ticks are run
in order, no overlay of any number of flows can deadlock, and one flow's transfers hide behind the other's.
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
    """One rank's place in a tree. `children` are in the order in which their sums are added."""

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


def below(rank: int, size: int, root: int = 0) -> tuple[Span, ...]:
    """Return the chunks of a rank's subtree in the binomial tree, itself included."""
    place = (rank - root) % size
    low = place & -place or size
    return circular(rank, min(low, size - place), size)


def chain(rank: int, size: int, root: int = 0) -> Tree:
    """Return the tree without branches: root, root + 1, ..., and around."""
    place = (rank - root) % size
    parent = (rank - 1) % size if place else None
    children = ((rank + 1) % size,) if place + 1 < size else ()
    return Tree(parent, children, place, size - 1)


def in_order(rank: int, size: int, first: int = 0) -> Tree:
    """Return the binary tree whose in-order walk is first, first + 1, ...: every second rank is a leaf.

    In places counted from 1 the level of a place is its number of trailing zero bits. Where a parent would lie
    beyond the last place, the next one up steps in.
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


def up(tree: Tree, segments: Sequence[Span]) -> Iterator[Timed]:
    """Sum every segment towards the root."""
    for tick, span in enumerate(segments, tree.height - tree.depth):
        if tree.children:
            yield tick - 1, Round(recvs=tuple(Recv(child, span, reduce=True) for child in tree.children))
        if tree.parent is not None:
            yield tick, Round(sends=(Send(tree.parent, span),))


def down(tree: Tree, segments: Sequence[Span]) -> Iterator[Timed]:
    """Hand every segment from the root to all; the child with the most below it, the last, comes first."""
    for tick, span in enumerate(segments, tree.height + tree.depth):
        if tree.parent is not None:
            yield tick - 1, Round(recvs=(Recv(tree.parent, span),))
        if tree.children:
            yield tick, Round(sends=tuple(Send(child, span) for child in reversed(tree.children)))


def overlay(*flows: Iterable[Timed]) -> Iterator[Round]:
    """Join the rounds of each tick and leave the ticks without any out."""
    ticks: defaultdict[int, list[Round]] = defaultdict(list)
    for tick, step in joined(*flows):
        ticks[tick].append(step)
    for _, steps in sorted(ticks.items()):
        sends = tuple(send for step in steps for send in step.sends)
        recvs = tuple(recv for step in steps for recv in step.recvs)
        yield Round(sends, recvs)
