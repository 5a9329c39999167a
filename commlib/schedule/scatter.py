"""Scatter: the root contributes `size` chunks; rank r ends with chunk r."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule.ir import Recv, Round, Send
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, per_rank
from commlib.schedule.trees import binomial, subtree_chunks


@algorithm(
    "scatter",
    "direct",
    regions=per_rank,
    rooted=True,
    rounds=lambda size, segments: size - 1,
    sent=lambda size, segments: Fraction(size - 1, size),
)
def direct(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Send every chunk directly from the root.

    Rounds: P - 1 at the root. Bytes sent per rank: (P - 1)/P n, by the root.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    if rank != root:
        yield Round(recvs=(Recv(root, chunk(rank)),))
    elif size > 1:
        yield Round(sends=tuple(Send(peer, chunk(peer)) for peer in range(size) if peer != root))


@algorithm(
    "scatter",
    "binomial_tree",
    regions=per_rank,
    rooted=True,
    rounds=lambda size, segments: ceil_log2(size),
    sent=lambda size, segments: Fraction(size - 1, size),
)
def binomial_tree(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Send the chunks of complete subtrees down, the largest first.

    Rounds: ceil(log2 P). Bytes sent per rank: (P - 1)/P n, by the root, in up to two pieces where chunks wrap around.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    tree = binomial(rank, size, root)
    if tree.parent is not None:
        yield Round(recvs=tuple(Recv(tree.parent, span) for span in subtree_chunks(rank, size, root)))
    if tree.children:
        largest_first = reversed(tree.children)
        yield Round(
            sends=tuple(Send(child, span) for child in largest_first for span in subtree_chunks(child, size, root))
        )
