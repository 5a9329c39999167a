"""commlib for PyTorch: verbs on tensors, and data parallelism in a line.

import commlib_torch as ct

ct.init()
model = ...
ct.broadcast_parameters(model.state_dict())
optimizer = ct.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())

Ordered verbs are spelled as in MPI (`all_reduce`, a sum by default): all ranks must call them in the same order. Verbs
that are spelled as in Horovod (`allreduce`, a mean by default) have names and run in any order. They are from
`commlib_torch.horovod`, and also here, so that a script of `horovod.torch` runs with a changed import.
"""

import typing as _typing

from commlib import __version__
from commlib import horovod as _horovod
from commlib.arguments import missing_attribute as _missing_attribute
from commlib.expert import Experts
from commlib.horovod import *
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib_torch import collectives as _collectives
from commlib_torch import elastic, tensor
from commlib_torch._graph_breaks import leave_uncompiled
from commlib_torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from commlib_torch.checkpoint import Checkpoint
from commlib_torch.clip import clip_grad_norm_
from commlib_torch.collectives import *
from commlib_torch.compression import Compression
from commlib_torch.data_parallel import DataParallel
from commlib_torch.expert import (
    MoE,
    auxiliary_loss,
    expert_stats,
    expertize,
    load_experts,
    rebalance_experts,
    save_experts,
)
from commlib_torch.gradients import join
from commlib_torch.loss_scale import GradScaler
from commlib_torch.named_verbs import movement as _movement
from commlib_torch.named_verbs import reductions as _reductions
from commlib_torch.named_verbs.movement import *
from commlib_torch.named_verbs.reductions import *
from commlib_torch.named_verbs.sparse import sparse_allreduce_async
from commlib_torch.one_bit import OneBitAdam, OneBitLAMB
from commlib_torch.optimizer import DistributedOptimizer, WrappedOptimizer
from commlib_torch.pipelines.pipeline import Pipeline, pipeline
from commlib_torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from commlib_torch.tensor import (
    ParallelAttention,
    ParallelMLP,
    context,
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    parallelize,
    streams,
    vocabulary_cross_entropy,
)

__all__ = [
    "__version__",
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "join",
    "sparse_allreduce_async",
    "Checkpoint",
    "Column",
    "DataParallel",
    "Experts",
    "GradScaler",
    "MoE",
    "OneBitAdam",
    "OneBitLAMB",
    "ParallelAttention",
    "ParallelMLP",
    "Pipeline",
    "Row",
    "Vocabulary",
    "WrappedOptimizer",
    "auxiliary_loss",
    "clip_grad_norm_",
    "context",
    "convert_sync_batchnorm",
    "expert_stats",
    "expertize",
    "gather_optimizer_state",
    "gather_state_dict",
    "load_experts",
    "load_optimizer_state",
    "parallelize",
    "pipeline",
    "rebalance_experts",
    "save_experts",
    "streams",
    "tensor",
    "vocabulary_cross_entropy",
]
__all__ += _horovod.__all__
__all__ += _collectives.__all__
__all__ += _movement.__all__
__all__ += _reductions.__all__

# All modules except layers, whose computations a compiler may trace.
leave_uncompiled(
    [
        "commlib", "numba", "llvmlite", "mpi4py", "ml_dtypes",
        *(
            f"{__name__}.{part}"
            for part in (
                "_autograd", "_bridge", "_call", "_recorded_verbs", "_shards", "_slots", "_graph_breaks", "adasum",
                "broadcast", "clip", "collectives", "devices", "gradients", "horovod", "named_verbs", "one_bit",
                "optimizer", "pipelines.pipeline",
            )
        ),
    ]
)  # fmt: skip

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
