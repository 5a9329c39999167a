"""Buckets: pack parameters, and give each gradient its place. [pure]

Backward makes gradients roughly in reverse module order, so parameters are packed in reverse until the real order is
known: the first bucket is complete early, and is kept small so that communication starts early. Every rank computes the
same buckets from the same parameters and order; `parameter_check` checks that they have the same parameters.

    bucket   | slot: gradient of w | slot: b | pad | slot: v ........ | flags: w b v | pad |
                                                                        one element each, > 0 if used somewhere

The flags answer, within the same all-reduce, which parameters got a gradient on any rank: an optimizer with momentum
or weight decay treats "no gradient" and "a gradient of zeros" differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

ALIGNMENT = 64
"""Bytes. A slot starts on a cache line, so that no two slots share one and vector loads are aligned."""

FIRST_BUCKET_MIB = 1.0
BUCKET_CAP_MIB = 4.0
"""Small: the last bucket cannot be hidden behind backward, and a link of 1 Gbit/s takes 33 ms for 4 MiB."""


_NO_CAP = 1 << 62  # bytes

Kind = tuple[str, int, str, str, str, float]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describe one gradient to reduce: `count` elements that travel as `dtype`, with `itemsize` bytes each."""

    name: str
    count: int
    dtype: str
    itemsize: int
    reduction: str = "mean"
    device: str = "cpu"
    """The kind of device that it is on, the same on all ranks."""
    axis: str = ""
    """The name of the ranks that it is reduced over; "" are all that train together."""
    scale: float = 1.0
    """What the result is multiplied by."""
    native_itemsize: int = 0
    """Bytes of an element before it was cast to `dtype`; 0 if it was not."""

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def kind(self) -> Kind:
        """What parameters that share a bucket have in common."""
        return self.dtype, self.itemsize, self.reduction, self.device, self.axis, self.scale


@dataclass(frozen=True, slots=True)
class Slot:
    """Say where one parameter lives in its bucket. Units: elements of the bucket's dtype."""

    parameter: int
    """Index of the parameter in module order."""
    offset: int
    count: int
    flag: int
    """Index of its "used" element."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Group gradients that are reduced as one array of `count` elements."""

    index: int
    """Place in the launch order, the same on every rank."""
    dtype: str
    itemsize: int
    reduction: str
    slots: tuple[Slot, ...]
    flags: int
    """Where the "used" elements start, one per slot in slot order."""
    count: int
    device: str = "cpu"
    axis: str = ""
    scale: float = 1.0
    saved_nbytes: int = 0
    """Bytes that its gradients had more before they were cast."""

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def parameters(self) -> tuple[int, ...]:
        return tuple(slot.parameter for slot in self.slots)


def make_buckets(
    parameters: Sequence[Parameter],
    *,
    order: Sequence[int] | None = None,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    groups: Sequence[Sequence[int]] = (),
    flags: int = 0,
    parts: int = 1,
) -> tuple[Bucket, ...]:
    """Pack `parameters`, given in module order, into buckets in launch order.

    `order` are the numbers of all parameters as their gradients become ready, by default reverse module order. A bucket
    holds one kind: dtype, reduction, device, axis and scale. It stays within its cap in MiB (the first of each kind
    within `first_bucket_mib`) unless a single parameter is larger than that. Buckets are ordered by when backward
    completes them. Parameters of one of `groups` share a bucket, one for each kind, whatever its size.

    The last bucket gets `flags` slots without elements: their "used" elements carry what else the ranks tell each
    other, at no extra message. They are numbered after the parameters. If it is not reduced over all ranks, there is
    one more for them alone. `parts` is into how many equal parts a bucket's values can be cut.

    Raises ValueError for caps that are not positive, and for another order than one of all parameters.
    """
    if first_bucket_mib <= 0 or bucket_cap_mib <= 0:
        raise ValueError(f"bucket caps must be positive, got {first_bucket_mib} and {bucket_cap_mib} MiB")
    if order is None:
        order = range(len(parameters) - 1, -1, -1)
    if sorted(order) != list(range(len(parameters))):
        raise ValueError(f"the order must name each of {len(parameters)} parameters once, got {list(order)}")
    cap = int(bucket_cap_mib * 2**20)
    first_cap = min(cap, int(first_bucket_mib * 2**20))
    # A bucket is complete when its last parameter is ready.
    place = {parameter: position for position, parameter in enumerate(order)}
    grouped = {index for group in groups for index in group}
    packed = list(_pack(parameters, [index for index in order if index not in grouped], first_cap, cap))
    for group in groups:
        packed.extend(_pack(parameters, sorted(group, key=place.__getitem__), _NO_CAP, _NO_CAP))
    packed.sort(key=lambda members: place[members[-1]])
    buckets = [_bucket(index, members, parameters, parts) for index, members in enumerate(packed)]
    if buckets and flags:
        if buckets[-1].axis:
            buckets.append(Bucket(len(buckets), "float32", 4, "sum", (), flags=0, count=0))
        buckets[-1] = _with_flags(buckets[-1], range(len(parameters), len(parameters) + flags))
    return tuple(buckets)


def complete_order(ready: Iterable[int], count: int) -> list[int]:
    """Return all of `count` parameters: those that were `ready`, in that order, then the others in reverse."""
    order = dict.fromkeys(ready)
    order.update(dict.fromkeys(range(count - 1, -1, -1)))
    return [parameter for parameter in order if parameter < count]


def _pack(parameters: Sequence[Parameter], order: Sequence[int], first_cap: int, cap: int) -> Iterator[list[int]]:
    """Yield groups of parameter indices, each in order."""
    open_groups: dict[Kind, list[int]] = {}
    sizes: dict[Kind, int] = {}
    limits: dict[Kind, int] = {}
    for index in order:
        kind = parameters[index].kind
        size = _align(parameters[index].nbytes)
        group = open_groups.setdefault(kind, [])
        if group and sizes[kind] + size > limits.setdefault(kind, first_cap):
            yield group
            group = open_groups[kind] = []
            limits[kind] = cap
        sizes[kind] = size + (sizes[kind] if group else 0)
        group.append(index)
    yield from open_groups.values()


def _bucket(index: int, members: Sequence[int], parameters: Sequence[Parameter], parts: int) -> Bucket:
    kind = parameters[members[0]]
    offsets, end, saved = [], 0, 0
    for parameter in (parameters[member] for member in members):
        offsets.append(end)
        end += _align(parameter.nbytes) // kind.itemsize
        saved += parameter.count * ((parameter.native_itemsize or kind.itemsize) - kind.itemsize)
    unit = parts * ALIGNMENT // kind.itemsize
    end = -(-end // unit) * unit
    slots = tuple(
        Slot(member, offset, parameters[member].count, end + position)
        for position, (member, offset) in enumerate(zip(members, offsets, strict=True))
    )
    return Bucket(
        index,
        kind.dtype,
        kind.itemsize,
        kind.reduction,
        slots,
        flags=end,
        count=_align((end + len(members)) * kind.itemsize) // kind.itemsize,
        device=kind.device,
        axis=kind.axis,
        scale=kind.scale,
        saved_nbytes=saved,
    )


def _with_flags(bucket: Bucket, numbers: Iterable[int]) -> Bucket:
    slots = list(bucket.slots)
    for number in numbers:
        slots.append(Slot(number, offset=bucket.flags, count=0, flag=bucket.flags + len(slots)))
    count = _align((bucket.flags + len(slots)) * bucket.itemsize) // bucket.itemsize
    return replace(bucket, slots=tuple(slots), count=count)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
