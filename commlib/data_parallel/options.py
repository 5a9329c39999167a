"""Options: say how a GradientReducer reduces gradients, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from commlib.compress import AllToAll, Scheme, codec_of
from commlib.compress.casts import narrowed
from commlib.compress.choice import Choice, choose
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.devices.arrays import device_named
from commlib.devices.protocol import Device
from commlib.dtypes import FLOATS, NUMPY
from commlib.errors import UsageError

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Options:
    """Say everything about gradients, once. Raises UsageError for what makes no sense."""

    op: str = "mean"
    bucket_cap_mib: float = BUCKET_CAP_MIB
    first_bucket_mib: float = FIRST_BUCKET_MIB
    passes_per_step: int = 1
    """Backward passes whose gradients are added up before they are reduced."""
    overlap: bool | None = None
    """Launch buckets while backward runs; None decides by where the ranks are and the cores they have."""
    compression: Any = "none"
    """What `commlib.compress.choice.choose` takes."""
    within_node: bool = False
    """Compress between the ranks of a node too."""
    predivide: float = 1.0
    """Divide by this before adding, and multiply by it afterwards: the adapter does, in the gradient's own dtype."""
    sparse_as_dense: bool = False
    shard: bool = False
    """Leave each rank one part of the reduced gradients, and of the parameters: see `Shards`."""

    def __post_init__(self) -> None:
        if not isinstance(self.compression, Choice):
            object.__setattr__(self, "compression", choose(self.compression))
        if self.op not in REDUCTIONS:
            raise UsageError(f"op must be one of {', '.join(REDUCTIONS)}, got {self.op!r}")
        if self.passes_per_step < 1:
            raise UsageError(f"backward_passes_per_step must be at least 1, got {self.passes_per_step}")
        if not self.predivide > 0:
            raise UsageError(f"gradient_predivide_factor must be positive, got {self.predivide}")
        if self.predivide != 1 and self.op != "mean":
            raise UsageError("gradient_predivide_factor splits an average in two, so it needs op=Average")
        if self.shard and (self.scheme is not None or self.compressor is not None):
            raise UsageError("gradients that are sharded cannot be compressed beyond a cast: leave compression out")

    @property
    def scheme(self) -> Scheme | None:
        """How gradients are compressed on their way, beyond a cast."""
        scheme: Scheme | None = self.compression.scheme
        return scheme

    @property
    def compressor(self) -> Any:
        """The user's own compressor, if there is one."""
        return self.compression.compressor

    def for_ranks_of(self, ranks: Any) -> Options:
        """Return the options that do the same best over `ranks`.

        Where nodes have several ranks, buckets of half precision would cross the network as float32, in which they are
        added up. Encoded, they cross as they are.
        """
        if not self.compression.wire or not ranks.is_hierarchical:
            return self
        codec = codec_of("fp16" if self.compression.wire == "float16" else "bf16")
        return replace(self, compression=Choice(scheme=AllToAll(codec)))

    def wire_dtype(self, dtype: str) -> str:
        """Return the dtype in which gradients of `dtype` travel in buckets, or are compressed from."""
        if self.scheme is not None and dtype in FLOATS:
            return "float32"
        return narrowed(dtype, self.compression.wire)

    def describe(self) -> str:
        """Return what all ranks must agree on."""
        return " ".join(self.lines())

    def lines(self) -> list[str]:
        """Return what all ranks must agree on, one thing in each line."""
        if self.scheme is not None:
            wire = f"{self.scheme.name} within_node={self.within_node}"
        elif self.compressor is not None:
            wire = type(self.compressor).__name__
        else:
            wire = self.wire_dtype("float32")
        return [
            f"op={self.op}", f"caps={self.first_bucket_mib}, {self.bucket_cap_mib} MiB",
            f"passes={self.passes_per_step}", f"overlap={self.overlap}", f"float32 as {wire}",
            f"predivide={self.predivide}", f"sparse_as_dense={self.sparse_as_dense}", f"shard={self.shard}",
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gradient:
    """Describe one gradient as an adapter gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The core's name of it, such as "bfloat16". Complex numbers are pairs of real ones: one dimension more."""
    device: str = "cpu"
    """The kind of device that it is on, the same on all ranks."""
    axis: str = ""
    """The name of the ranks that it is reduced over; "" are all that train together."""
    scale: float = 1.0
    """What the result is multiplied by."""
    is_known: bool = True
    """Whether shape and dtype are known, and not only the name: of a gradient that is None."""

    def __str__(self) -> str:
        if not self.is_known:
            return f"{self.name}: None"
        where = f" over {self.axis} times {self.scale}" if self.axis else ""
        there = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.name}: {self.dtype}{list(self.shape)}{there}{where}"

    @property
    def place(self) -> Device:
        """The device of this process that it is on. Raises UsageError if there is none."""
        found: Device = device_named(self.device, self.name)
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return NUMPY[self.dtype].itemsize

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.itemsize
