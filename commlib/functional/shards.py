"""Shards: one rank's part of a weight, cut from the whole, and the whole put together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commlib.dtypes import Array
from commlib.functional.axis import Axis
from commlib.tensor.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Shard:
    """What a parameter holds on this rank: the part of an axis' rank of an array that is divided by `sharding`."""

    axis: Axis
    sharding: Sharding

    def own(self, whole: Array) -> Array:
        """Return this rank's part of the whole array: a new one."""
        return part(whole, self.sharding, self.axis.rank, self.axis.size)

    def whole(self, own: Array) -> Array:
        """Return the whole array, made of the parts of all ranks. Collective over the axis."""
        sharding, size = self.sharding, self.axis.size
        front = np.ascontiguousarray(np.moveaxis(own, sharding.dim, 0))
        gathered = self.axis.comm.all_gather_v(front)
        offsets = np.cumsum([0, *sharding.lengths(size)])
        out = np.empty((len(gathered), *front.shape[1:]), own.dtype)
        for rank, first, last, start in sharding.pieces(size):
            out[start : start + last - first] = gathered[offsets[rank] + first : offsets[rank] + last]
        return np.ascontiguousarray(np.moveaxis(out, 0, sharding.dim))


def part(whole: Array, sharding: Sharding, rank: int, size: int) -> Array:
    """Return the part of one of `size` ranks: a new, contiguous array."""
    front = (slice(None),) * sharding.dim
    pieces = [whole[(*front, slice(*span))] for span in sharding.spans(rank, size)]
    return np.concatenate(pieces, axis=sharding.dim)
