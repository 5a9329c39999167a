"""Verbs: the definitions of the measured verbs, with their buffers, bus bandwidth and lower bound of memory traffic.

Sizes are those of nccl-tests (doc/PERFORMANCE.md): n bytes is the buffer of all_reduce, broadcast, reduce and
send_recv. For the other verbs it is the full array, of which each rank has one of P parts on one side or on both.
algbw = n / time, and busbw = algbw * factor, which is comparable with the speed of a link for any P.

The bound: the ranks of a node must read each byte of each rank's input at least once, and write each byte of each
result once unless it is already in place. Summed over the ranks and divided equally among them, that is, per
rank, for a total of n bytes:

    verb            given      results     read        written
    all_reduce      P x n      P x n       n           n
    reduce_scatter  P x n      P x n/P     n           n/P
    all_gather      P x n/P    P x n       n/P         n            in place: (P-1)/P n written
    broadcast       n          (P-1) x n   n/P         (P-1)/P n
    reduce          P x n      n           n           n/P
    all_to_all      P x n      P x n       n           n            in place: (P-1)/P n both
    all_to_all_v    P x n      P x n       n           n
    all_gather_v, reduce_scatter_v         as all_gather and reduce_scatter
    scan            P x n      P x n       n           n
    exscan          (P-1) x n  (P-1) x n   (P-1)/P n   (P-1)/P n
    gather          P x n/P    n           n/P         n/P
    scatter         n          P x n/P     n/P         n/P
    send_recv       P x n      P x n       n           n

The time of the bound is that of one plain pass over this memory (`measure.memory_pass`), on every rank at once: a
copy of n bytes if n are read and n are written; an update of n bytes in place, which is faster, if results
replace the data that was read (reductions and all_to_all in place). So the bound of all_reduce out of place is one copy
of n, and in place one update of n. It is a lower bound: if receivers fetch (all_gather, broadcast), each rank reads
all bytes that it writes. And it is a bound of memory: data that stays in the caches from call to call is not included,
so a call that first reads the most recently written data may take less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

# Shares of the total n, as functions of P.
Share = Callable[[int], Fraction]


def _all(ranks: int) -> Fraction:
    return Fraction(1)


def _part(ranks: int) -> Fraction:
    return Fraction(1, ranks)


def _others(ranks: int) -> Fraction:
    return Fraction(ranks - 1, ranks)


def _twice_others(ranks: int) -> Fraction:
    return 2 * _others(ranks)


@dataclass(frozen=True, slots=True)
class BenchVerb:
    """A verb.

    gives, gets: a rank's input and output: "whole", "part" (one of P) or "" (nothing).
    giver, getter: "all", or only the "root"; "later": all ranks but rank 0.
    in_place: "only", "usual" (the default), "able" or "not". A part is in place at its position in the full array.
    has_out: whether a call takes the array for its result, else it returns a new one. has_plan: whether a call can be
    prepared.
    """

    name: str
    gives: str
    gets: str
    factor: Share
    read: Share
    written: Share
    giver: str = "all"
    getter: str = "all"
    reduces: bool = False
    in_place: str = "not"
    has_algorithms: bool = True
    has_out: bool = True
    has_plan: bool = True

    @property
    def rooted(self) -> bool:
        return self.name == "broadcast" or "root" in (self.giver, self.getter)

    def shares(self, ranks: int) -> int:
        """Return the number of equal shares of the total.

        In all_to_all_v rank r sends 1 + (r + t) % P shares to rank t: uneven, but each rank sends and gets as many.
        In all_gather_v and reduce_scatter_v the part of rank r has 1 + r shares.
        """
        if self.name.endswith("_v"):
            return ranks * (ranks + 1) // 2
        return ranks if "part" in (self.gives, self.gets) or self.name == "all_to_all" else 1

    def part_shares(self, rank: int) -> int:
        """Return the number of shares in the part of a rank."""
        return 1 + rank if self.name in ("all_gather_v", "reduce_scatter_v") else 1

    def count(self, elements: int, ranks: int) -> int:
        """Return the number of elements (of the buffer, or of one share) that fit into `elements`; at least one."""
        return max(1, elements // self.shares(ranks))

    def bound(self, nbytes: int, ranks: int, *, in_place: bool) -> tuple[int, int, bool]:
        """Return the bytes that a rank must read and write, and whether written bytes replace read ones."""
        read, written = self.read(ranks), self.written(ranks)
        if in_place and self.name in ("all_gather", "all_to_all"):
            written -= _part(ranks)
        if in_place and self.name == "all_to_all":
            read -= _part(ranks)
        return int(nbytes * read), int(nbytes * written), in_place and (self.reduces or self.name == "all_to_all")


VERBS = {
    verb.name: verb
    for verb in (
        BenchVerb("all_reduce", "whole", "whole", _twice_others, _all, _all, reduces=True, in_place="usual"),
        BenchVerb("reduce_scatter", "whole", "part", _others, _all, _part, reduces=True, in_place="able"),
        BenchVerb("all_gather", "part", "whole", _others, _part, _all, in_place="able"),
        BenchVerb("broadcast", "whole", "whole", _all, _part, _others, giver="root", in_place="only"),
        BenchVerb("reduce", "whole", "whole", _all, _all, _part, getter="root", reduces=True, in_place="able"),
        BenchVerb("all_to_all", "whole", "whole", _others, _all, _all, in_place="able"),
        BenchVerb("all_to_all_v", "whole", "whole", _others, _all, _all, has_algorithms=False),
        BenchVerb("all_gather_v", "part", "whole", _others, _part, _all, has_algorithms=False, has_out=False),
        BenchVerb("reduce_scatter_v", "whole", "part", _others, _all, _part, reduces=True, has_algorithms=False),
        BenchVerb("scan", "whole", "whole", _all, _all, _all, reduces=True, has_algorithms=False),
        BenchVerb(
            "exscan", "whole", "whole", _all, _others, _others, getter="later", reduces=True, has_algorithms=False
        ),
        BenchVerb("gather", "part", "whole", _others, _part, _part, getter="root"),
        BenchVerb("scatter", "whole", "part", _others, _part, _part, giver="root"),
        BenchVerb("send_recv", "whole", "whole", _all, _all, _all, has_algorithms=False, has_plan=False),
        BenchVerb("barrier", "", "", _all, _all, _all, has_algorithms=False),
    )
}
ONLY_MPI = ("all_gather_v", "reduce_scatter_v", "scan", "exscan")
"""Verbs that neither gloo and NCCL nor the formats of other benchmarks have."""
