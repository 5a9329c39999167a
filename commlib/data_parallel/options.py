"""Options: the settings of a GradientReducer, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from commlib.arguments import read_flag, suggest
from commlib.compress import AllToAll, Scheme, codec_of
from commlib.compress.casts import narrow_dtype
from commlib.compress.choice import CompressionChoice, choose
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.devices.arrays import device_named
from commlib.devices.protocol import Device
from commlib.dtypes import FLOATS, NUMPY
from commlib.errors import UsageError

REDUCTIONS = ("mean", "sum")
_FLAGS = {"within_node": "compress_within_node", "sparse_as_dense": "sparse_as_dense", "shard": "shard"}
"""Fields that are True or False, with the arguments that set them."""
_POSITIVE = {
    "bucket_cap_mib": "bucket_cap_mib",
    "first_bucket_mib": "first_bucket_mib",
    "predivide": "gradient_predivide_factor",
}
"""Fields that are positive numbers, with the arguments that set them."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings for the reduction of gradients. Raises UsageError for invalid values."""

    op: str = "mean"
    bucket_cap_mib: float = BUCKET_CAP_MIB
    first_bucket_mib: float = FIRST_BUCKET_MIB
    passes_per_step: int = 1
    """Backward passes that accumulate gradients before a reduction."""
    overlap: bool | None = None
    """Launch buckets while backward runs; None decides by the placement of ranks and their number of cores."""
    compression: Any = "none"
    """An argument for `commlib.compress.choice.choose`."""
    within_node: bool = False
    """Compress between the ranks of a node too."""
    predivide: float = 1.0
    """Divide by this before the sum, and multiply by it afterwards. The adapter does so, in the gradient's dtype."""
    sparse_as_dense: bool = False
    shard: bool = False
    """Leave each rank one part of the reduced gradients, and of the parameters, as `Shards` does."""
    shard_axis: str = ""
    """The name of the axis of ranks that hold one copy together, such as those of a node; "" means all ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.compression, CompressionChoice):
            object.__setattr__(self, "compression", choose(self.compression))
        if self.op not in REDUCTIONS:
            raise UsageError(
                f"op must be one of {', '.join(REDUCTIONS)}, got {self.op!r}{suggest(self.op, REDUCTIONS)}"
            )
        for name, argument in (*_FLAGS.items(), ("overlap", "overlap")):
            flag = read_flag(argument, getattr(self, name), may_be_none=name == "overlap")
            object.__setattr__(self, name, flag)
        object.__setattr__(self, "passes_per_step", read_passes(self.passes_per_step))
        for name, argument in _POSITIVE.items():
            if not _is_within(getattr(self, name), 0, math.inf):
                raise UsageError(f"{argument} must be a positive number, got {getattr(self, name)!r}")
        if self.predivide != 1 and self.op != "mean":
            raise UsageError("gradient_predivide_factor splits the division of an average, so it needs op=Average")
        if self.shard_axis and not self.shard:
            raise UsageError(f"shard_axis={self.shard_axis!r} needs shard=True")
        if self.shard and (self.scheme is not None or self.compressor is not None):
            raise UsageError("sharded gradients cannot be compressed beyond a cast: leave compression out")

    @property
    def scheme(self) -> Scheme | None:
        """The compression scheme for gradients, beyond a cast."""
        scheme: Scheme | None = self.compression.scheme
        return scheme

    @property
    def compressor(self) -> Any:
        """The user's compressor, or None."""
        return self.compression.compressor

    def for_ranks_of(self, ranks: Any) -> Options:
        """Return equivalent options that are fastest for `ranks`.

        If nodes have several ranks, half-precision buckets are added up as float32 and would cross the network as
        float32. Encoded buckets cross it in half precision. Sharded buckets are not encoded.
        """
        if not self.compression.wire or not ranks.is_hierarchical or self.shard:
            return self
        codec = codec_of("fp16" if self.compression.wire == "float16" else "bf16")
        return replace(self, compression=CompressionChoice(scheme=AllToAll(codec)))

    def wire_dtype(self, dtype: str) -> str:
        """Return the dtype in which gradients of `dtype` travel in buckets, or from which they are compressed."""
        if self.scheme is not None and dtype in FLOATS:
            return "float32"
        return narrow_dtype(dtype, self.compression.wire)

    def describe(self) -> str:
        """Return the settings that all ranks must share."""
        return " ".join(self.lines())

    def lines(self) -> list[str]:
        """Return the settings that all ranks must share, one per line."""
        if self.scheme is not None:
            wire = f"{self.scheme.name} within_node={self.within_node}"
        elif self.compressor is not None:
            wire = type(self.compressor).__name__
        else:
            wire = self.wire_dtype("float32")
        return [
            f"op={self.op}", f"caps={self.first_bucket_mib}, {self.bucket_cap_mib} MiB",
            f"passes={self.passes_per_step}", f"overlap={self.overlap}", f"float32 as {wire}",
            f"predivide={self.predivide}", f"sparse_as_dense={self.sparse_as_dense}",
            f"shard={self.shard_axis or self.shard}",
        ]  # fmt: skip


def read_passes(passes: Any) -> int:
    """Return `backward_passes_per_step` as an int. Raises UsageError unless it is a whole number of at least 1."""
    if not _is_within(passes, 0, math.inf) or passes != int(passes):
        raise UsageError(f"backward_passes_per_step must be a whole number, at least 1, got {passes!r}")
    return int(passes)


def _is_within(value: Any, least: float, most: float) -> bool:
    """Return whether a value is a number between two others, excluding both."""
    try:
        return bool(least < value < most)
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Gradient:
    """The description of one gradient, from an adapter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The core's dtype name, such as "bfloat16". Complex numbers are pairs of real ones, in one more dimension."""
    device: str = "cpu"
    """The device type, the same on all ranks."""
    axis: str = ""
    """The name of the axis of ranks to reduce over; "" means all ranks that train together."""
    scale: float = 1.0
    """The factor for the result."""
    is_known: bool = True
    """False if the gradient is None: then its name is known, but neither its shape nor its dtype."""

    def __str__(self) -> str:
        if not self.is_known:
            return f"{self.name}: None"
        where = f" over {self.axis} times {self.scale}" if self.axis else ""
        there = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.name}: {self.dtype}{list(self.shape)}{there}{where}"

    @property
    def place(self) -> Device:
        """This process's device of that type. Raises UsageError if there is none."""
        result: Device = device_named(self.device, self.name)
        return result

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return NUMPY[self.dtype].itemsize

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Total number of bytes."""
        return self.count * self.itemsize
