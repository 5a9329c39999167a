"""Which gradients share a bucket: the core's buckets, with the user's groups, and flags of the reducer in the last."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from commlib.data_parallel import Bucket, Parameter, Slot, make_buckets
from commlib.data_parallel.buckets import ALIGNMENT
from commlib.errors import UsageError

_NO_CAP_MIB = 2.0**40

Groups = int | Sequence[Sequence[Tensor]] | None


def lay_out(
    specs: Sequence[Parameter],
    groups: Sequence[Sequence[int]],
    flags: int,
    *,
    first_mib: float,
    cap_mib: float,
    order: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Return the buckets in launch order. Parameters of one of `groups` share a bucket, one for each kind.

    `order` are the numbers of all parameters as their gradients become ready, by default reverse module order. The last
    bucket, which is complete when backward ends, gets `flags` slots without elements: their "used" elements carry what
    else the ranks tell each other, at no extra message. They are numbered after the parameters.
    """
    order = range(len(specs) - 1, -1, -1) if order is None else order
    place = {parameter: position for position, parameter in enumerate(order)}

    def packed(members: Sequence[int], first: float, cap: float) -> Iterator[Bucket]:
        ready = sorted(range(len(members)), key=lambda number: place[members[number]])
        own = [specs[member] for member in members]
        for bucket in make_buckets(own, order=ready, first_bucket_mib=first, bucket_cap_mib=cap):
            slots = tuple(replace(slot, parameter=members[slot.parameter]) for slot in bucket.slots)
            yield replace(bucket, slots=slots)

    grouped = {index for group in groups for index in group}
    buckets = list(packed([index for index in range(len(specs)) if index not in grouped], first_mib, cap_mib))
    for group in groups:
        buckets.extend(packed(sorted(group), _NO_CAP_MIB, _NO_CAP_MIB))
    buckets.sort(key=lambda bucket: max(place[parameter] for parameter in bucket.parameters))
    if buckets:
        buckets[-1] = _with_flags(buckets[-1], range(len(specs), len(specs) + flags))
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(buckets))


def find_groups(groups: Groups, parameters: Sequence[Tensor], known: Iterable[Any]) -> list[list[int]]:
    """Return the groups as numbers of `parameters`. A number of groups deals them out in order, as equally as can be.

    `known` are ids of tensors that may be named although they are not among `parameters`, such as frozen ones. Raises
    UsageError, which is a ValueError, for anything else.
    """
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(f"groups must be a non-negative number or a list of lists of parameters, got {groups}")
        count = min(groups, len(parameters))
        bounds = [len(parameters) * number // count for number in range(count + 1)] if count else [0]
        return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise UsageError("groups must be a non-negative number or a list of lists of parameters")
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    others, seen = set(known), set()
    found: list[list[int]] = []
    for place, group in enumerate(groups):
        members: list[int] = []
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise UsageError(f"groups must consist of tensors, but group {place} has a {type(parameter).__name__}")
            if id(parameter) in seen:
                raise UsageError(f"a parameter may appear only once in groups, but one is in group {place} again")
            seen.add(id(parameter))
            if id(parameter) in numbers:
                members.append(numbers[id(parameter)])
            elif id(parameter) not in others:
                raise UsageError(f"group {place} has a tensor that is no parameter of the optimizer")
        if members:
            found.append(members)
    return found


def _with_flags(bucket: Bucket, numbers: Iterable[int]) -> Bucket:
    slots = list(bucket.slots)
    for number in numbers:
        slots.append(Slot(number, offset=bucket.flags, count=0, flag=bucket.flags + len(slots)))
    unit = ALIGNMENT // bucket.itemsize
    count = -(-(bucket.flags + len(slots)) // unit) * unit
    return replace(bucket, slots=tuple(slots), count=count)
