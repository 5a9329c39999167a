"""Buckets: pack parameters into buckets and assign each gradient a slot. [pure]

Backward makes gradients roughly in reverse module order, so parameters are packed in reverse until the real order is
known. The first bucket is complete early, and is kept small to start communication early. Every rank computes the same
buckets from the same parameters and order; `parameter_check` checks that the parameters are the same.

    bucket   | slot: gradient of w | slot: b | pad | slot: v ........ | flags: w b v | pad |
                                                                        one element each, > 0 if used somewhere

One all-reduce thus also answers which parameters got a gradient on any rank. An optimizer with momentum or weight decay
treats "no gradient" and "a gradient of zeros" differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

ALIGNMENT = 64
"""Bytes. A slot starts on a cache line: no two slots share one, and vector loads are aligned."""

FIRST_BUCKET_MIB = 1.0
BUCKET_CAP_MIB = 4.0
"""Small, because the last bucket cannot be hidden behind backward, and a 1 Gbit/s link takes 33 ms for 4 MiB."""


_NO_CAP = 1 << 62  # bytes

BucketKey = tuple[str, int, str, str, str, float]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One gradient to reduce: `count` elements that travel as `dtype`, `itemsize` bytes each."""

    name: str
    count: int
    dtype: str
    itemsize: int
    reduction: str = "mean"
    device: str = "cpu"
    """The device type, the same on all ranks."""
    axis: str = ""
    """The name of the axis of ranks to reduce over; "" means all ranks that train together."""
    scale: float = 1.0
    """The factor for the result."""
    native_itemsize: int = 0
    """Bytes per element before the cast to `dtype`; 0 without a cast."""

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def kind(self) -> BucketKey:
        """The properties that all parameters of a bucket share."""
        return self.dtype, self.itemsize, self.reduction, self.device, self.axis, self.scale


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one parameter in its bucket, in elements of the bucket's dtype."""

    parameter: int
    """Index of the parameter in module order."""
    offset: int
    count: int
    flag: int
    """Index of its "used" element."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced as one array of `count` elements."""

    index: int
    """Position in the launch order, the same on every rank."""
    dtype: str
    itemsize: int
    reduction: str
    slots: tuple[Slot, ...]
    flags: int
    """Offset of the "used" elements, one per slot in slot order."""
    count: int
    device: str = "cpu"
    axis: str = ""
    scale: float = 1.0
    saved_nbytes: int = 0
    """Bytes that the cast of its gradients saved."""

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

    `order` lists all parameter numbers in the order in which their gradients become ready, by default reverse module
    order. A bucket holds one kind: dtype, reduction, device, axis and scale. It stays within its cap in MiB (the first
    of each kind within `first_bucket_mib`) unless a single parameter is larger. Buckets follow the order in which
    backward completes them. Parameters in one of `groups` share a bucket per kind, of any size.

    The last bucket gets `flags` more slots without elements. Their "used" elements carry the ranks' flags without an
    extra message. They are numbered after the parameters. If the last bucket is not reduced over all ranks, an extra
    bucket carries the flags. The values of a bucket can be cut into `parts` equal parts.

    Raises ValueError for caps that are not positive, or if the order is not a permutation of all parameters.
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
    """Return all `count` parameters: the `ready` ones in that order, then the others in reverse."""
    order = dict.fromkeys(ready)
    order.update(dict.fromkeys(range(count - 1, -1, -1)))
    return [parameter for parameter in order if parameter < count]


def _pack(parameters: Sequence[Parameter], order: Sequence[int], first_cap: int, cap: int) -> Iterator[list[int]]:
    """Yield groups of parameter indices, each in order."""
    open_groups: dict[BucketKey, list[int]] = {}
    sizes: dict[BucketKey, int] = {}
    limits: dict[BucketKey, int] = {}
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
