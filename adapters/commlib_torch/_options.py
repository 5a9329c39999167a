"""How a DistributedOptimizer or a DataParallel reduces gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.compress import Codec, Exchanged, Scheme, codec_of, scheme_of
from commlib.data_parallel import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.errors import UsageError
from commlib_torch._bridge import dtype_name
from commlib_torch._layout import Groups, find_groups
from commlib_torch.compression import Cast, Compressing, Compression, Compressor
from commlib_torch.horovod._start import ProcessSets

REDUCTIONS = ("mean", "sum")

_CASTS = {"none": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}


@dataclass(frozen=True, slots=True)
class Options:
    """What is said about gradients, once. Raises UsageError for what makes no sense."""

    op: str = "mean"
    bucket_cap_mib: float = BUCKET_CAP_MIB
    first_bucket_mib: float = FIRST_BUCKET_MIB
    passes_per_step: int = 1
    overlap: bool | None = None
    compression: Compressing = Cast
    within_node: bool = False
    """Compress between the ranks of a node too."""
    predivide: float = 1.0
    """Divide by this before adding, and multiply by it after taking the mean."""
    groups: Groups = None
    sparse_as_dense: bool = False
    process_set: ProcessSets = None

    def __post_init__(self) -> None:
        given = self.compression
        if isinstance(given, str) and given in _CASTS:  # these travel in buckets of their own dtype
            object.__setattr__(self, "compression", _CASTS[given])
        elif isinstance(given, str | Codec | Scheme):
            object.__setattr__(self, "compression", scheme_of(given))
        elif not (isinstance(given, type) and issubclass(given, Cast)) and not hasattr(given, "decompress"):
            raise UsageError(
                "compression must be a name such as 'int8', a codec or scheme of commlib.compress, one of Compression, "
                f"or have compress and decompress, got {given!r}"
            )
        if self.op not in REDUCTIONS:
            raise UsageError(f"op must be one of {', '.join(REDUCTIONS)}, got {self.op!r}")
        if not self.predivide > 0:
            raise UsageError(f"gradient_predivide_factor must be positive, got {self.predivide}")
        if self.predivide != 1 and self.op != "mean":
            raise UsageError("gradient_predivide_factor splits an average in two, so it needs op=Average")

    @property
    def cast(self) -> type[Cast] | None:
        """The cast, if that is what the compression is."""
        given = self.compression
        return given if isinstance(given, type) and issubclass(given, Cast) else None

    @property
    def compressor(self) -> Compressor | None:
        """The user's own compressor, if there is one."""
        given = self.compression
        return None if isinstance(given, Scheme | type) else given  # type: ignore[return-value]

    @property
    def scheme(self) -> Scheme | None:
        """How gradients are compressed on their way, beyond a cast."""
        return self.compression if isinstance(self.compression, Scheme) else None

    def for_ranks_of(self, comm: Any) -> Options:
        """Return the options that do the same best over `comm`.

        Where nodes have several ranks, buckets of half precision would cross the network as float32, in which they are
        added up. Encoded, they cross as they are.
        """
        if self.cast is None or self.cast.wire is None or not comm.is_hierarchical:
            return self
        codec = codec_of("fp16" if self.cast.wire == torch.float16 else "bf16")
        return replace(self, compression=Exchanged(codec))

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` travel in buckets, or are compressed from."""
        if self.scheme is not None and dtype.is_floating_point:
            return torch.float32
        return dtype if self.cast is None else self.cast.wire_dtype(dtype)

    def find_groups(self, parameters: Sequence[Tensor], known: Collection[int]) -> list[list[int]]:
        """Return the groups as numbers of parameters."""
        return find_groups(self.groups, parameters, known)

    def describe(self) -> str:
        """Return what all ranks must agree on."""
        if self.scheme is not None:
            wire = f"{self.scheme.name} within_node={self.within_node}"
        elif self.compressor is not None:
            wire = type(self.compressor).__name__
        else:
            wire = dtype_name(self.wire_dtype(torch.float32))
        return (
            f"op={self.op} caps={self.first_bucket_mib}, {self.bucket_cap_mib} MiB passes={self.passes_per_step} "
            f"overlap={self.overlap} float32 as {wire} predivide={self.predivide} "
            f"sparse_as_dense={self.sparse_as_dense}"
        )


def reduction_name(op: Any) -> str:
    """Return "mean" or "sum" for what `op=` takes; Horovod's own names included. Raises UsageError for others."""
    names = {core.Average: "mean", core.Sum: "sum"}
    try:
        return names[core.resolve_op(op)]
    except (KeyError, ValueError):
        raise UsageError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}") from None


def communicator_of(process_set: ProcessSets, what: str) -> Communicator:
    """Return a communicator of the ranks of a process set: see `ProcessSet.communicator`."""
    found: Communicator = core.process_set_of(process_set).communicator(what)
    return found
