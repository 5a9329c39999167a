"""How a DistributedOptimizer or a DataParallel reduces gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.data_parallel import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.errors import UsageError
from commlib_torch._bridge import dtype_name
from commlib_torch._layout import Groups, find_groups
from commlib_torch._named import ProcessSets
from commlib_torch.compression import Cast, Compressor, Compressors

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Options:
    """What is said about gradients, once. Raises UsageError for what makes no sense."""

    op: str = "mean"
    bucket_cap_mib: float = BUCKET_CAP_MIB
    first_bucket_mib: float = FIRST_BUCKET_MIB
    passes_per_step: int = 1
    overlap: bool | None = None
    compression: Compressors = Cast
    predivide: float = 1.0
    """Divide by this before adding, and multiply by it after taking the mean."""
    groups: Groups = None
    sparse_as_dense: bool = False
    process_set: ProcessSets = None

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise UsageError(f"op must be one of {', '.join(REDUCTIONS)}, got {self.op!r}")
        if not self.predivide > 0:
            raise UsageError(f"gradient_predivide_factor must be positive, got {self.predivide}")
        if self.predivide != 1 and self.op != "mean":
            raise UsageError("gradient_predivide_factor splits an average in two, so it needs op=Average")

    @property
    def compressor(self) -> Compressor | None:
        """The user's own compressor, if there is one: what merely casts travels in buckets."""
        return None if isinstance(self.compression, type) and issubclass(self.compression, Cast) else self.compression

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` travel in buckets."""
        if isinstance(self.compression, type) and issubclass(self.compression, Cast):
            return self.compression.wire_dtype(dtype)
        return dtype

    def find_groups(self, parameters: Sequence[Tensor], known: Collection[int]) -> list[list[int]]:
        """Return the groups as numbers of parameters."""
        return find_groups(self.groups, parameters, known)

    def describe(self) -> str:
        """Return what all ranks must agree on."""
        compressor = self.compressor
        wire = type(compressor).__name__ if compressor is not None else dtype_name(self.wire_dtype(torch.float32))
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
