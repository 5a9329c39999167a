"""Shards: one rank's part of a weight; split a full weight into them, and gather it from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.single_rank import SingleRank
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import AnySharding, NestedSharding, Sharding


@dataclass(frozen=True, slots=True)
class Shard:
    """The contents of a parameter on this rank: the shard of the axis' rank of an array with a sharding.

    is_local: the ranks of the axis have other data, and this shard processes the data of all of them. Its gradient is
    already the sum over these ranks, and is summed only over `replicas`, the ranks with the same shard, if there are
    any.
    """

    axis: ParallelAxis
    sharding: AnySharding
    replicas: Communicator | None = None
    is_local: bool = False

    @property
    def reduced_over(self) -> str:
        """The name of the ranks over which a gradient is reduced; "" means all ranks that train together."""
        if not self.is_local:
            return ""
        return f"{self.axis.comm.name}, replicas" if self.replicas is None else self.replicas.name

    @property
    def counted(self) -> tuple[int, tuple[tuple[int, int], ...] | None]:
        """The portion of this rank's shard that counts in sums over the axis: a shared piece counts on its first rank.

        Returns the dimension, and the spans of the pieces along it; None for the full shard.
        """
        rank, size = self.axis.rank, self.axis.size
        if not isinstance(self.sharding, Sharding) or not self.sharding.may_share(size):
            return 0, None
        sharing = self.sharding.sharing(rank, size)
        own = tuple((first, last) for copies, first, last in sharing if rank % copies == 0)
        return self.sharding.dim, None if len(own) == len(sharing) else own

    def scale(self, op: str, ranks: int) -> float:
        """Return the factor on a gradient that was reduced by `op`; ranks: the number of ranks that train together.

        A local shard processes the data of all ranks, so its mean is the sum divided by `ranks`, not by the replicas
        only.
        """
        if not self.is_local or op != "mean":
            return 1.0
        return (1 if self.replicas is None else self.replicas.size) / ranks

    def __deepcopy__(self, memo: Any) -> Shard:
        return self

    def own(self, whole: Array) -> Array:
        """Return this rank's shard of the full array: a new one."""
        return part(whole, self.sharding, self.axis.rank, self.axis.size)

    def whole(self, own: Array) -> Array:
        """Return the full array, gathered from the shards of all ranks. Collective over the axis."""
        sharding, size = self.sharding, self.axis.size
        gathered = self.axis.comm.all_gather_v(np.ascontiguousarray(own).reshape(-1))
        shapes = [sharding.local(rank, size) for rank in range(size)]
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(gathered, ends), shapes, strict=True)]
        return join(parts, sharding)


def group_local_shards(shards: Iterable[tuple[str, Shard | None]]) -> dict[str, Any]:
    """Return the ranks, by `reduced_over`, of shards that are not reduced over all ranks. shards: by names, for errors.

    Raises UsageError if ranks have shards of different sizes, which would not fit the same buckets.
    """
    groups: dict[str, Any] = {}
    for name, shard in shards:
        if shard is None or not shard.is_local:
            continue
        lengths = shard.sharding.lengths(shard.axis.size)
        if len(set(lengths)) > 1:
            raise UsageError(
                f"{name}: ranks have {list(lengths)} of {shard.sharding.shape[0]} experts, but training needs equally "
                f"many on each rank. Use a multiple of {shard.axis.size} experts"
            )
        groups[shard.reduced_over] = SingleRank() if shard.replicas is None else shard.replicas
    return groups


def check_same_shard(
    what: str, shards: Iterable[tuple[str, Shard | None]], ranks: Sequence[int], *, local: bool = False
) -> None:
    """Raise UsageError if some of `ranks` hold other shards of a weight that they would average or broadcast.

    shards: by names, for errors. ranks: ranks of the world. local: whether local shards are averaged or broadcast, too.
    """
    for name, shard in shards:
        if shard is None or (shard.is_local and not local):
            continue
        axis = shard.axis
        if others := others_of(shard, ranks):
            raise UsageError(
                f"{what}: {name} on rank {axis.rank} of {axis.comm.name} is a shard of {list(shard.sharding.shape)}, "
                f"but ranks {others} of the world have other shards, which would be mixed. Pass the mesh, or the ranks "
                "with the same shard (mesh=mesh, or those along its axis dp)"
            )


def others_of(shard: Shard, ranks: Sequence[int]) -> list[int]:
    """Return the ranks among `ranks`, ranks of the world, that hold other shards than this one."""
    own = world_ranks(shard.axis.comm)
    return [rank for rank in own if rank in ranks and rank != own[shard.axis.rank]]


def world_ranks(comm: Any) -> tuple[int, ...]:
    """Return the ranks of a communicator as ranks of the world; none for a single rank without one."""
    return tuple(comm.group.ranks) if isinstance(comm, Communicator) else ()


def part(whole: Array, sharding: AnySharding, rank: int, size: int) -> Array:
    """Return the shard of one of `size` ranks: a new, contiguous array."""
    if isinstance(sharding, NestedSharding):
        inner = sharding.ranks
        return part(part(whole, sharding.outer, rank // inner, size // inner), sharding.inner, rank % inner, inner)
    front = (slice(None),) * sharding.dim
    pieces = [whole[(*front, slice(*span))] for span in sharding.spans(rank, size)]
    return np.concatenate(pieces, axis=sharding.dim)


def join(parts: Sequence[Array], sharding: AnySharding) -> Array:
    """Return the full array from the shards of all ranks in order: a new, contiguous array."""
    if isinstance(sharding, NestedSharding):
        inner = sharding.ranks
        groups = [parts[start : start + inner] for start in range(0, len(parts), inner)]
        return join([join(group, sharding.inner) for group in groups], sharding.outer)
    front = (slice(None),) * sharding.dim
    pieces = sharding.pieces(len(parts))
    return np.concatenate(
        [parts[rank][(*front, slice(first, last))] for rank, first, last, _ in pieces], axis=sharding.dim
    )
