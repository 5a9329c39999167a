"""Moves: how a tensor changes its layout over an axis, and what its gradient does on the way back. [pure]

    move                    forward             backward            its conjugate
    copy                    nothing             all-reduce          reduce
    reduce                  all-reduce          nothing             copy
    scatter                 own shard           all-gather          gather
    gather                  all-gather          own shard           scatter
    gather, partial         all-gather          reduce-scatter      reduce_scatter
    reduce_scatter          reduce-scatter      all-gather          gather, partial
    all_to_all(a, b)        divide a, join b    divide b, join a    all_to_all(b, a)

A loss that all ranks of the axis compute counts once. So the gradient of what is whole on every rank is the same on
all of them, unless what follows differs from rank to rank: then each has a part of the gradient, and parts are added
(`copy`, and `gather` with `partial`). The conjugate of a conjugate is the move itself: gradients of gradients need no
further rules. Source: Shoeybi et al., Megatron-LM (2019), f and g; Korthikanti et al. (2022) for sequences.
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
class Move:
    """One of the moves, by its name in `_CONJUGATE`.

    dim: the dimension that is divided or joined, negative from the end. join: for all_to_all, the dimension that is
    joined while `dim` is divided. lengths, joined: of the ranks' shards along each, where they are known; else what is
    divided is divided evenly (the first ranks have one more), and what is joined is asked for.
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
            raise UsageError(f"all_to_all: dimension {self.dim} cannot be divided and joined at once")

    @property
    def conjugate(self) -> Move:
        """The move of the gradient."""
        if self is COPY or self is REDUCE:  # most are
            return REDUCE if self is COPY else COPY
        name = _CONJUGATE[self.name]
        if name == "all_to_all":
            return Move(name, self.join, self.dim, self.joined, self.lengths)
        return replace(self, name=name)

    def known(self, lengths: tuple[int, ...], joined: tuple[int, ...] = ()) -> Move:
        """Return the same move with the lengths of the shards."""
        return replace(self, lengths=lengths, joined=joined)

    def received(self, nbytes: int, size: int) -> float:
        """Return the bytes that each of `size` ranks receives at least, for `nbytes` of the whole tensor on one."""
        if size == 1 or self.name in ("copy", "scatter"):
            return 0.0
        share = nbytes * (size - 1) / size
        return {"reduce": 2 * share, "all_to_all": share / size}.get(self.name, share)


COPY = Move("copy")
REDUCE = Move("reduce")


def scatter(dim: int = 0, lengths: tuple[int, ...] = ()) -> Move:
    """Return the move that keeps this rank's shard of what all ranks have."""
    return Move("scatter", dim, lengths=lengths)


def gather(dim: int = 0, *, partial: bool = False, lengths: tuple[int, ...] = ()) -> Move:
    """Return the move that joins the shards of all ranks.

    partial: what is computed with the whole differs from rank to rank, so that gradients are parts, to be added.
    """
    return Move("gather_partial" if partial else "gather", dim, lengths=lengths)


def reduce_scatter(dim: int = 0, lengths: tuple[int, ...] = ()) -> Move:
    """Return the move that adds the tensors of all ranks and keeps this rank's shard of the sum."""
    return Move("reduce_scatter", dim, lengths=lengths)


def all_to_all(divide: int, join: int) -> Move:
    """Return the move from shards along `join` to shards along `divide`."""
    return Move("all_to_all", divide, join)
