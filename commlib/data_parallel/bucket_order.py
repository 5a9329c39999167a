"""BucketOrder: put gradients into buckets, and rebuild the buckets when their order changes.

Buckets are in reverse module order at first. The first backward shows in which order gradients really become ready;
where buckets are launched during backward, they are then made anew, once, by the order of rank 0. They also change
when gradients turn out to travel outside the buckets.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from commlib.data_parallel.buckets import Bucket, Parameter, complete_order, make_buckets
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.ranks import Ranks
from commlib.dtypes import NUMPY
from commlib.errors import UsageError

ACTIVE, SPARSE_FOUND, OTHERS_MISSING = 0, 1, 2
"""Flags: this rank has not joined; it found a sparse gradient that not all ranks know of; it lacks other gradients than
those that ranks have agreed on, where all must lack the same, or has none, because its backward raised."""
FLAGS = 3
"""What ranks tell each other in the last bucket. Flag i is number `len(gradients) + i`."""


class BucketOrder:
    """The buckets of `gradients`, the same on all ranks.

    `groups` are numbers of gradients that share a bucket. `order`, if it is known beforehand, are the numbers of all
    as they become ready, the same on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
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
        """Ranks have agreed on the order, or that there is no reason to."""

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets as they should be, by what ranks know."""
        parts = self._ranks.size if self._options.shard else 1
        return buckets_of(self._gradients, self._options, self._groups, self._order, self._unbucketed, parts)

    @property
    def order(self) -> list[int] | None:
        """The order of gradients that ranks have agreed on; None for reverse module order."""
        return self._order

    def restore(self, order: Sequence[int] | None) -> None:
        """Take an order for agreed on. The same on all ranks."""
        self._order, self.is_settled = None if order is None else list(order), True

    def learn(self, seen: Sequence[int], *, overlap: bool) -> bool:
        """Agree on the order in which gradients become ready; return whether one was agreed on now. Collective.

        `seen` are the gradients that the last backward made. Rank 0 decides, because ranks may have seen other orders,
        or none: if it ran no backward it is asked again after the next reduction, if it does not `overlap` never.
        """
        if self.is_settled:
            return False
        mine: list[int] | None = None
        if self._ranks.rank == 0 and overlap:
            mine = complete_order(seen, len(self._gradients)) if seen else []
        said = next((theirs for theirs in self._ranks.all_gather_object(mine) if theirs is not None), None)
        self.is_settled = said is None or bool(said)
        self._order = said or None
        return bool(said)


def buckets_of(
    gradients: Sequence[Gradient],
    options: Options,
    groups: Sequence[Sequence[int]],
    order: Sequence[int] | None,
    unbucketed: Container[int],
    parts: int = 1,
) -> tuple[Bucket, ...]:
    """Return the buckets of gradients, in launch order. Raises UsageError for caps that make no sense."""
    try:
        return make_buckets(
            [_parameter(gradient, options, index in unbucketed) for index, gradient in enumerate(gradients)],
            order=order,
            first_bucket_mib=options.first_bucket_mib,
            bucket_cap_mib=options.bucket_cap_mib,
            groups=groups,
            flags=FLAGS,
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
