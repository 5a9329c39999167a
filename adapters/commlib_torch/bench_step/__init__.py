"""Training steps for `commlib bench step`: one model in PyTorch, trained with each kind of parallelism."""

from __future__ import annotations

from typing import Any

from commlib.bench.steps.contract import Contenders, StepSizes
from commlib_torch.bench_step import kinds


def contenders(kind: str, comm: Any, sizes: StepSizes, *, peer: bool) -> Contenders:
    """Return the steps of a kind: "dp", "tp", "pp" or "moe". Collective. peer: add DistributedDataParallel (dp)."""
    if kind == "dp":
        return kinds.data_parallel(comm, sizes, peer=peer)
    return {"tp": kinds.tensor_parallel, "pp": kinds.pipeline_parallel, "moe": kinds.experts}[kind](comm, sizes)
