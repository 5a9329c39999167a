"""Segment times: formulas for trees and chains with segmented data, whose simulation would take S P messages.

All chunks have the same length here, so a time is a function of three variables: `alpha`, `transfer` (beta c),
`combine` (gamma c). Below, m is the time of a message, alpha + beta c, and g is gamma c. The first segment meets an
idle machine: its time is that of the tree's critical path. Each later one adds its time at the busiest rank, its
*period*.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from commlib.schedule.spans import ceil_log2, floor_log2

Shape = Callable[[int], tuple[int, ...]]
"""Maps the number of ranks in a subtree to the sizes of its root's subtrees, in the order of `Tree.children`."""


def binomial(ranks: int) -> tuple[int, ...]:
    return tuple(min(1 << bit, ranks - (1 << bit)) for bit in range(ceil_log2(ranks)))


def in_order(ranks: int) -> tuple[int, ...]:
    root = 1 << floor_log2(ranks)
    return tuple(below for below in (root - 1, ranks - root) if below)


def reduce_time(ranks: int, shape: Shape, message: float, combine: float) -> float:
    """Return the time at which the root of a tree has the sum of one segment."""

    @cache
    def ready(ranks: int) -> float:
        children = sorted(map(ready, shape(ranks)))
        time = 0.0
        for child in children:
            time = max(time, child) + message  # one port, first come, first served
        return time + len(children) * combine  # a round combines once all its messages have arrived

    return ready(ranks)


def broadcast_time(ranks: int, shape: Shape, message: float) -> float:
    """Return the time at which the last rank of a tree has one segment of the root's data.

    The last child is served first.
    """

    @cache
    def done(ranks: int) -> float:
        served = enumerate(reversed(shape(ranks)), 1)
        return max((turn * message + done(child) for turn, child in served), default=0.0)

    return done(ranks)


def chain(size: int, segments: int, alpha: float, transfer: float, combine: float) -> float:
    """A rank receives a segment, combines it, and forwards it while it receives the next."""
    return (size - 2 + segments) * (alpha + transfer + combine) if size > 1 else 0.0


def chain_broadcast(size: int, segments: int, alpha: float, transfer: float, combine: float) -> float:
    """A chain that combines nothing."""
    return chain(size, segments, alpha, transfer, 0.0)


def binomial_broadcast(size: int, segments: int, alpha: float, transfer: float, combine: float) -> float:
    """The root sends every segment to each of its children."""
    return segments * ceil_log2(size) * (alpha + transfer)


def binomial_reduce(size: int, segments: int, alpha: float, transfer: float, combine: float) -> float:
    """The root receives a segment from each of its children, then combines them."""
    message = alpha + transfer
    first = reduce_time(size, binomial, message, combine)
    return first + (segments - 1) * ceil_log2(size) * (message + combine)


def binomial_all_reduce(size: int, segments: int, alpha: float, transfer: float, combine: float) -> float:
    """Exact for one segment.

    In the long run the root, with k = ceil(log2 P) children, needs k (m + g) for a segment, because it receives one
    while it sends another. Before that, a segment on its way up waits behind an earlier one on its way down: the i-th
    waits about 2 (k - i) messages; one turn longer if the last child has k - 1 children too (beyond 3/4 of a power of
    two).
    """
    message, children = alpha + transfer, ceil_log2(size)
    period = children * (message + combine)
    time = reduce_time(size, binomial, message, combine) + children * message
    deep = 4 * size > 3 << children
    early = range(2, min(segments, children) + 1)
    for index in early:
        turns = children - index + deep + (deep and index == 3)
        time += max(period, 2 * turns * message)
    return time + (segments - 1 - len(early)) * period


def double_tree_all_reduce(size: int, segments: int, alpha: float, transfer: float, combine: float) -> float:
    """Exact for up to 3 ranks.

    An inner rank of one tree is a leaf of the other: for a pair of segments each of its ports carries 4 messages, and
    it combines 2. But the ports are not always free when they are needed. Simulated with many segments, a period has
    4.7 messages from 8 ranks on, whatever the number of ranks; the schedule's docstring bounds it by 5.
    """
    if size == 2:  # both trees send to the same rank at once, and pay alpha once
        return (segments + 1) * alpha + segments * (2 * transfer + combine)
    message = alpha + transfer
    first = reduce_time(size, in_order, message, combine) + broadcast_time(size, in_order, message)
    messages = {1: 0.0, 3: 3.0, 4: 4.0, 5: 4.0, 6: 4.2, 7: 4.4}.get(size, 4.7)
    return first + (segments - 1) * (messages * message + min(size - 1, 2) * combine)


Formula = Callable[[int, int, float, float, float], float]

PIPELINES: dict[tuple[str, str], Formula] = {
    ("broadcast", "chain"): chain_broadcast,
    ("broadcast", "binomial_tree"): binomial_broadcast,
    ("reduce", "chain"): chain,
    ("reduce", "binomial_tree"): binomial_reduce,
    ("all_reduce", "binomial_tree"): binomial_all_reduce,
    ("all_reduce", "double_tree"): double_tree_all_reduce,
}

APPROXIMATE = {("all_reduce", "binomial_tree"): 0.10, ("all_reduce", "double_tree"): 0.20}
"""The largest relative errors against the simulation, with more than a few messages; the other formulas are exact."""
