"""BucketOrder: assign gradients to buckets, and rebuild the buckets when their order changes.

Initial buckets follow reverse module order. The first backward shows the order in which gradients become ready. If
buckets are launched during backward, they are then rebuilt once, in the order of rank 0. They are also rebuilt when
gradients turn out to travel outside the buckets.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from commlib.data_parallel.buckets import Bucket, Parameter, complete_order, make_buckets
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.dtypes import NUMPY
from commlib.errors import UsageError


class Flags(NamedTuple):
    """The parameter numbers of the flags that ranks exchange in the last bucket. They follow those of the gradients."""

    active: int
    """This rank has not joined."""
    sparse_found: int
    """It found a sparse gradient that some ranks do not know of."""
    others_missing: int
    """Its missing gradients differ from the agreed set, where all ranks must lack the same ones, or its backward
    raised."""

    @classmethod
    def after(cls, count: int) -> Flags:
        """Return the numbers after those of `count` gradients."""
        return cls._make(range(count, count + len(cls._fields)))


class BucketOrder:
    """The buckets of `gradients`, the same on all ranks.

    `groups` lists the numbers of gradients that share a bucket. `order`, if it is known in advance, lists all numbers
    in the order in which gradients become ready, the same on all ranks.
    """

    def __init__(
        self,
        ranks: ReducerRanks,
        options: Options,
        gradients: Sequence[Gradient],
        groups: Sequence[Sequence[int]],
        unbucketed: Container[int],
        order: Sequence[int] | None = None,
    ) -> None:
        self._ranks, self._options = ranks, options
        self._gradients, self._groups, self._unbucketed = gradients, groups, unbucketed
        self._order = None if order is None else list(order)
        self.is_settled = not gradients or order is not None or options.shard
        """Ranks have agreed on the order, or need no agreement."""

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets that follow from what ranks have agreed on."""
        parts = self._ranks.size if self._options.shard else 1
        return buckets_of(self._gradients, self._options, self._groups, self._order, self._unbucketed, parts)

    @property
    def order(self) -> list[int] | None:
        """The agreed order of gradients; None for reverse module order."""
        return self._order

    def restore(self, order: Sequence[int] | None) -> None:
        """Set the agreed order, the same on all ranks."""
        self._order, self.is_settled = None if order is None else list(order), True

    def learn(self, seen: Sequence[int], *, overlap: bool) -> bool:
        """Agree on the order in which gradients become ready; return whether a new order was agreed on. Collective.

        `seen` lists the gradients of the last backward. Rank 0 decides, because other ranks may have seen another order
        or none. If rank 0 ran no backward, ranks try again after the next reduction. If rank 0 does not `overlap`, they
        never do.
        """
        if self.is_settled:
            return False
        mine: list[int] | None = None
        if self._ranks.rank == 0 and overlap:
            mine = complete_order(seen, len(self._gradients)) if seen else []
        decided = next((theirs for theirs in self._ranks.all_gather_object(mine) if theirs is not None), None)
        self.is_settled = decided is None or bool(decided)
        self._order = decided or None
        return bool(decided)


def buckets_of(
    gradients: Sequence[Gradient],
    options: Options,
    groups: Sequence[Sequence[int]],
    order: Sequence[int] | None,
    unbucketed: Container[int],
    parts: int = 1,
) -> tuple[Bucket, ...]:
    """Return the buckets of gradients, in launch order. Raises UsageError for invalid caps."""
    try:
        return make_buckets(
            [_parameter(gradient, options, index in unbucketed) for index, gradient in enumerate(gradients)],
            order=order,
            first_bucket_mib=options.first_bucket_mib,
            bucket_cap_mib=options.bucket_cap_mib,
            groups=groups,
            flags=len(Flags._fields),
            parts=parts,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _parameter(gradient: Gradient, options: Options, unbucketed: bool) -> Parameter:
    wire = options.wire_dtype(gradient.dtype)
    return Parameter(
        gradient.name,
        0 if unbucketed else gradient.count,
        wire,
        NUMPY[wire].itemsize,
        options.op,
        device=gradient.device,
        axis=gradient.axis,
        scale=gradient.scale,
        native_itemsize=0 if wire == gradient.dtype else gradient.itemsize,
    )
