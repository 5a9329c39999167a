"""Gather: rank r contributes chunk r; the root ends with all `size` chunks."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule.ir import Recv, Round, Send
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, per_rank
from commlib.schedule.trees import binomial, subtree_chunks


@algorithm(
    "gather",
    "direct",
    regions=per_rank,
    rooted=True,
    rounds=lambda size, segments: size - 1,
    sent=lambda size, segments: Fraction(1, size) if size > 1 else 0,
)
def direct(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Send every chunk directly to the root.

    Rounds: P - 1 at the root. Bytes sent per rank: n/P.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    if rank != root:
        yield Round(sends=(Send(root, chunk(rank)),))
    elif size > 1:
        yield Round(recvs=tuple(Recv(peer, chunk(peer)) for peer in range(size) if peer != root))


def _bytes_sent(size: int, segments: int) -> Fraction:
    """Return the largest share that a child of the root sends.

    The root's last child has the ranks beyond the largest power of two below `size`; the one before, half of that
    power.
    """
    top = 1 << ceil_log2(size) >> 1
    return Fraction(max(size - top, top // 2), size) if size > 1 else Fraction(0)


@algorithm(
    "gather",
    "binomial_tree",
    regions=per_rank,
    rooted=True,
    rounds=lambda size, segments: ceil_log2(size),
    sent=_bytes_sent,
)
def binomial_tree(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Collect the chunks of larger and larger subtrees.

    Rounds: ceil(log2 P). Bytes sent per rank: at most n/2, in up to two pieces where chunks wrap around.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    tree = binomial(rank, size, root)
    if tree.children:
        yield Round(
            recvs=tuple(Recv(child, span) for child in tree.children for span in subtree_chunks(child, size, root))
        )
    if tree.parent is not None:
        yield Round(sends=tuple(Send(tree.parent, span) for span in subtree_chunks(rank, size, root)))
