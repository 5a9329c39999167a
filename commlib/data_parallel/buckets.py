"""Which gradient goes where: parameters packed into buckets. [pure]

Backward makes gradients roughly in reverse module order, so parameters are packed in reverse: the first bucket is
complete early, and is kept small so that communication starts early. Every rank computes the same buckets from the
same parameters; `agreement` checks that they have the same parameters.

    bucket   | slot: gradient of w | slot: b | pad | slot: v ........ | flags: w b v | pad |
                                                                        one element each, > 0 if used somewhere

The flags answer, within the same all-reduce, which parameters got a gradient on any rank: an optimizer with momentum
or weight decay treats "no gradient" and "a gradient of zeros" differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes. A slot starts on a cache line, so that no two slots share one and vector loads are aligned."""

FIRST_BUCKET_MIB = 1.0
BUCKET_CAP_MIB = 25.0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One gradient to reduce: `count` elements of `dtype`, which has `itemsize` bytes."""

    name: str
    count: int
    dtype: str
    itemsize: int
    reduction: str = "mean"

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lives in its bucket. Units: elements of the bucket's dtype."""

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
    """Place in the launch order, the same on every rank."""
    dtype: str
    itemsize: int
    reduction: str
    slots: tuple[Slot, ...]
    flags: int
    """Where the "used" elements start, one per slot in slot order."""
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def parameters(self) -> tuple[int, ...]:
        return tuple(slot.parameter for slot in self.slots)


def make_buckets(
    parameters: Sequence[Parameter],
    *,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
) -> tuple[Bucket, ...]:
    """Pack `parameters`, given in module order, into buckets in launch order.

    A bucket holds one dtype and one reduction. It stays within its cap in MiB (the first of each kind within
    `first_bucket_mib`) unless a single parameter is larger than that. Buckets are ordered by when backward completes
    them. Raises ValueError for caps that are not positive.
    """
    if first_bucket_mib <= 0 or bucket_cap_mib <= 0:
        raise ValueError(f"bucket caps must be positive, got {first_bucket_mib} and {bucket_cap_mib} MiB")
    cap = int(bucket_cap_mib * 2**20)
    first_cap = min(cap, int(first_bucket_mib * 2**20))
    groups = _pack(parameters, first_cap, cap)
    # A bucket is complete when its lowest parameter is: the later that one stands in the module, the sooner.
    ordered = sorted(groups, key=lambda members: -members[-1])
    return tuple(_bucket(index, members, parameters) for index, members in enumerate(ordered))


def _pack(parameters: Sequence[Parameter], first_cap: int, cap: int) -> Iterator[list[int]]:
    """Yield groups of parameter indices, each descending."""
    open_groups: dict[tuple[str, int, str], list[int]] = {}
    sizes: dict[tuple[str, int, str], int] = {}
    limits: dict[tuple[str, int, str], int] = {}
    for index in range(len(parameters) - 1, -1, -1):
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.itemsize, parameter.reduction)
        size = _align(parameter.nbytes)
        group = open_groups.setdefault(kind, [])
        if group and sizes[kind] + size > limits.setdefault(kind, first_cap):
            yield group
            group = open_groups[kind] = []
            limits[kind] = cap
        sizes[kind] = size + (sizes[kind] if group else 0)
        group.append(index)
    yield from open_groups.values()


def _bucket(index: int, members: Sequence[int], parameters: Sequence[Parameter]) -> Bucket:
    kind = parameters[members[0]]
    offsets, end = [], 0
    for member in members:
        offsets.append(end)
        end += _align(parameters[member].nbytes) // kind.itemsize
    slots = tuple(
        Slot(member, offset, parameters[member].count, end + position)
        for position, (member, offset) in enumerate(zip(members, offsets, strict=True))
    )
    count = _align((end + len(members)) * kind.itemsize) // kind.itemsize
    return Bucket(index, kind.dtype, kind.itemsize, kind.reduction, slots, end, count)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
