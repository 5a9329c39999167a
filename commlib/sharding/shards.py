"""Shards: one rank's part of a weight, cut from the whole, and the whole put together again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.single_rank import Alone
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import AnySharding, Nested, Sharding


@dataclass(frozen=True, slots=True)
class Shard:
    """What a parameter holds on this rank: the part of an axis' rank of an array that is divided by `sharding`.

    is_local: the ranks of the axis have other data, and this part sees all of theirs: its gradient is the sum over the
    ranks already, and is added up over `replicas` alone, those that have the same part, if there are any.
    """

    axis: Axis
    sharding: AnySharding
    replicas: Communicator | None = None
    is_local: bool = False

    @property
    def reduced_over(self) -> str:
        """The name of the ranks over which a gradient is reduced; "" are all that train together."""
        if not self.is_local:
            return ""
        return f"{self.axis.comm.name}, replicas" if self.replicas is None else self.replicas.name

    @property
    def counted(self) -> tuple[int, tuple[tuple[int, int], ...] | None]:
        """What of this rank's part counts in sums over the axis: of ranks that share some of it, the first has that.

        Returns the dimension, and where the pieces begin and end along it; None for all of it.
        """
        rank, size = self.axis.rank, self.axis.size
        if not isinstance(self.sharding, Sharding) or not self.sharding.may_share(size):
            return 0, None
        sharing = self.sharding.sharing(rank, size)
        own = tuple((first, last) for copies, first, last in sharing if rank % copies == 0)
        return self.sharding.dim, None if len(own) == len(sharing) else own

    def scale(self, op: str, ranks: int) -> float:
        """Return what a gradient is multiplied by, once it is reduced by `op`; ranks: those that train together.

        Of what sees all their data, a mean is the sum divided by all of them, not only by those that have the part.
        """
        if not self.is_local or op != "mean":
            return 1.0
        return (1 if self.replicas is None else self.replicas.size) / ranks

    def __deepcopy__(self, memo: Any) -> Shard:
        return self

    def own(self, whole: Array) -> Array:
        """Return this rank's part of the whole array: a new one."""
        return part(whole, self.sharding, self.axis.rank, self.axis.size)

    def whole(self, own: Array) -> Array:
        """Return the whole array, made of the parts of all ranks. Collective over the axis."""
        sharding, size = self.sharding, self.axis.size
        gathered = self.axis.comm.all_gather_v(np.ascontiguousarray(own).reshape(-1))
        shapes = [sharding.local(rank, size) for rank in range(size)]
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(gathered, ends), shapes, strict=True)]
        return joined(parts, sharding)


def reduced_apart(shards: Iterable[tuple[str, Shard | None]]) -> dict[str, Any]:
    """Return the ranks, by `reduced_over`, of shards that are not reduced over all ranks. shards: by names, for errors.

    Raises UsageError where ranks have parts of different sizes: they could not make the same buckets.
    """
    found: dict[str, Any] = {}
    for name, shard in shards:
        if shard is None or not shard.is_local:
            continue
        lengths = shard.sharding.lengths(shard.axis.size)
        if len(set(lengths)) > 1:
            raise UsageError(
                f"{name}: ranks have {list(lengths)} of {shard.sharding.shape[0]} experts: to be trained they need "
                f"equally many, so give a multiple of {shard.axis.size} experts"
            )
        found[shard.reduced_over] = Alone() if shard.replicas is None else shard.replicas
    return found


def check_apart(
    what: str, shards: Iterable[tuple[str, Shard | None]], ranks: Sequence[int], *, local: bool = False
) -> None:
    """Raise UsageError if some of `ranks` hold other parts of what they would average, or give to one another.

    shards: by names, for errors. ranks: as numbers of the world. local: they do so with parts that are local, too.
    """
    for name, shard in shards:
        if shard is None or (shard.is_local and not local):
            continue
        axis = shard.axis
        if others := others_of(shard, ranks):
            raise UsageError(
                f"{what}: {name} on rank {axis.rank} of {axis.comm.name} is a part of {list(shard.sharding.shape)}, of "
                f"which ranks {others} of the world have other parts: these would be taken for one weight. Give the "
                "mesh or the ranks that have the same part (mesh=mesh, or those along its axis dp)"
            )


def others_of(shard: Shard, ranks: Sequence[int]) -> list[int]:
    """Return which of `ranks`, as numbers of the world, hold other parts than this one."""
    own = world_ranks(shard.axis.comm)
    return [rank for rank in own if rank in ranks and rank != own[shard.axis.rank]]


def world_ranks(comm: Any) -> tuple[int, ...]:
    """Return the ranks of a communicator, as numbers of the world; none for a rank that is alone."""
    return tuple(comm.group.ranks) if isinstance(comm, Communicator) else ()


def part(whole: Array, sharding: AnySharding, rank: int, size: int) -> Array:
    """Return the part of one of `size` ranks: a new, contiguous array."""
    if isinstance(sharding, Nested):
        inner = sharding.ranks
        return part(part(whole, sharding.outer, rank // inner, size // inner), sharding.inner, rank % inner, inner)
    front = (slice(None),) * sharding.dim
    pieces = [whole[(*front, slice(*span))] for span in sharding.spans(rank, size)]
    return np.concatenate(pieces, axis=sharding.dim)


def joined(parts: Sequence[Array], sharding: AnySharding) -> Array:
    """Return the whole array, made of the parts of all ranks in their order: a new, contiguous one."""
    if isinstance(sharding, Nested):
        inner = sharding.ranks
        groups = [parts[start : start + inner] for start in range(0, len(parts), inner)]
        return joined([joined(group, sharding.inner) for group in groups], sharding.outer)
    front = (slice(None),) * sharding.dim
    pieces = sharding.pieces(len(parts))
    return np.concatenate(
        [parts[rank][(*front, slice(first, last))] for rank, first, last, _ in pieces], axis=sharding.dim
    )
