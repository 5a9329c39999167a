"""Moves: redistribution of a tensor over an axis, and of its gradient in the backward. [pure]

    move                    forward             backward            its conjugate
    copy                    nothing             all-reduce          reduce
    reduce                  all-reduce          nothing             copy
    scatter                 own shard           all-gather          gather
    gather                  all-gather          own shard           scatter
    gather, partial         all-gather          reduce-scatter      reduce_scatter
    reduce_scatter          reduce-scatter      all-gather          gather, partial
    all_to_all(a, b)        split a, join b     split b, join a     all_to_all(b, a)

A loss that all ranks of the axis compute counts once. So the gradient of a replicated tensor is the same on all ranks,
unless the operations after it differ between ranks: then each rank has a partial gradient, and these are summed
(`copy`, and `gather` with `partial`). The conjugate of a conjugate is the move itself, so gradients of gradients need
no further rules. Source: Shoeybi et al., Megatron-LM (2019), f and g; Korthikanti et al. (2022) for sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commlib.errors import UsageError

_CONJUGATE = {
    "copy": "reduce",
    "reduce": "copy",
    "scatter": "gather",
    "gather": "scatter",
    "gather_partial": "reduce_scatter",
    "reduce_scatter": "gather_partial",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True, slots=True)
class Redistribute:
    """One of the moves, by its name in `_CONJUGATE`.

    dim: the dimension that is split or joined, negative from the end. join: for all_to_all, the dimension that is
    joined while `dim` is split. lengths, joined: lengths of the ranks' shards along each, if known. Otherwise splits
    are even (the first ranks have one more), and lengths to join are all-gathered.
    """

    name: str
    dim: int = 0
    join: int = 0
    lengths: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in _CONJUGATE:
            raise UsageError(f"there is no move {self.name!r}: expected one of {', '.join(_CONJUGATE)}")
        if self.name == "all_to_all" and self.dim == self.join:
            raise UsageError(f"all_to_all: dimension {self.dim} cannot be both split and joined")

    @property
    def conjugate(self) -> Redistribute:
        """The move of the gradient."""
        if self is COPY or self is REDUCE:  # the most frequent moves
            return REDUCE if self is COPY else COPY
        name = _CONJUGATE[self.name]
        if name == "all_to_all":
            return Redistribute(name, self.join, self.dim, self.joined, self.lengths)
        return replace(self, name=name)

    def with_lengths(self, lengths: tuple[int, ...], joined: tuple[int, ...] = ()) -> Redistribute:
        """Return the same move with the lengths of the shards."""
        return replace(self, lengths=lengths, joined=joined)

    def received(self, nbytes: int, size: int) -> float:
        """Return the minimum bytes that each of `size` ranks receives, for `nbytes` of the full tensor on one rank."""
        if size == 1 or self.name in ("copy", "scatter"):
            return 0.0
        share = nbytes * (size - 1) / size
        return {"reduce": 2 * share, "all_to_all": share / size}.get(self.name, share)


COPY = Redistribute("copy")
REDUCE = Redistribute("reduce")


def scatter(dim: int = 0, lengths: tuple[int, ...] = ()) -> Redistribute:
    """Return the move that keeps this rank's shard of a replicated tensor."""
    return Redistribute("scatter", dim, lengths=lengths)


def gather(dim: int = 0, *, partial: bool = False, lengths: tuple[int, ...] = ()) -> Redistribute:
    """Return the move that joins the shards of all ranks.

    partial: later operations differ between ranks, so gradients are partial, and must be summed.
    """
    return Redistribute("gather_partial" if partial else "gather", dim, lengths=lengths)


def reduce_scatter(dim: int = 0, lengths: tuple[int, ...] = ()) -> Redistribute:
    """Return the move that adds the tensors of all ranks and keeps this rank's shard of the sum."""
    return Redistribute("reduce_scatter", dim, lengths=lengths)


def all_to_all(divide: int, join: int) -> Redistribute:
    """Return the move from shards along `join` to shards along `divide`."""
    return Redistribute("all_to_all", divide, join)
