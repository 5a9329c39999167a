"""commlib for PyTorch: verbs on tensors, and data parallelism in a line.

import commlib_torch as comm

comm.init()
model = ...
comm.broadcast_parameters(model.state_dict())
optimizer = comm.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())

It has everything that `horovod.torch` has, under the same names: `import commlib_torch as hvd`. Verbs that are spelt as
in MPI texts (`all_reduce`) run in the order in which they are called, which must be the same on all ranks; those that
are spelt as in Horovod (`allreduce`) have names, and run in any order.
"""

from commlib import __version__
from commlib import horovod as _horovod
from commlib.expert import Experts
from commlib.horovod import *
from commlib.tensor_parallel import Column, PerRank, Replicate, Row, Sequence, Slice, Vocabulary
from commlib_torch import collectives as _collectives
from commlib_torch import tensor
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
from commlib_torch.horovod import elastic
from commlib_torch.horovod import movement as _movement
from commlib_torch.horovod import reductions as _reductions
from commlib_torch.horovod.movement import *
from commlib_torch.horovod.reductions import *
from commlib_torch.horovod.sparse import sparse_allreduce_async
from commlib_torch.loss_scale import GradScaler
from commlib_torch.one_bit import OneBitAdam, OneBitLAMB
from commlib_torch.optimizer import DistributedOptimizer
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
    "Checkpoint",
    "Column",
    "Compression",
    "DataParallel",
    "DistributedOptimizer",
    "Experts",
    "GradScaler",
    "MoE",
    "OneBitAdam",
    "OneBitLAMB",
    "ParallelAttention",
    "ParallelMLP",
    "PerRank",
    "Pipeline",
    "Replicate",
    "Row",
    "Sequence",
    "Slice",
    "SyncBatchNorm",
    "Vocabulary",
    "auxiliary_loss",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "context",
    "convert_sync_batchnorm",
    "elastic",
    "expert_stats",
    "expertize",
    "gather_optimizer_state",
    "gather_state_dict",
    "join",
    "load_experts",
    "load_optimizer_state",
    "parallelize",
    "pipeline",
    "rebalance_experts",
    "save_experts",
    "sparse_allreduce_async",
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
                "_autograd", "_bridge", "_call", "_shards", "_slots", "_graph_breaks", "adasum", "broadcast", "clip",
                "collectives", "devices", "gradients", "horovod", "one_bit", "optimizer", "pipelines.pipeline",
            )
        ),
    ]
)  # fmt: skip
