"""commlib for TensorFlow and Keras: verbs on tensors, data parallelism, and Horovod's API.

import commlib_tensorflow as ct

ct.init()
ct.broadcast_variables(model.variables, root_rank=0)
with tf.GradientTape() as tape:
    ...
tape = ct.DistributedGradientTape(tape)

Ordered verbs are spelled as in MPI (`all_reduce`, a sum by default): all ranks must call them in the same order. Verbs
that are spelled as in Horovod (`allreduce`, a mean by default) have names and run in any order. They are from
`commlib_tensorflow.horovod`, and also here, so that a script of `horovod.tensorflow` runs with a changed import.
"""

import typing as _typing

from commlib import __version__
from commlib import horovod as _horovod
from commlib.arguments import missing_attribute as _missing_attribute
from commlib.expert import Experts
from commlib.horovod import *
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib_tensorflow import broadcast as _broadcast
from commlib_tensorflow import collectives as _collectives
from commlib_tensorflow import elastic, tensor
from commlib_tensorflow._keras_reduction import WrappedOptimizer
from commlib_tensorflow.broadcast import *
from commlib_tensorflow.checkpoint import Checkpoint
from commlib_tensorflow.clip import clip_by_global_norm
from commlib_tensorflow.collectives import *
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.expert import MoE, expert_stats, expertize, load_experts, rebalance_experts, save_experts
from commlib_tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from commlib_tensorflow.named_verbs import operations as _operations
from commlib_tensorflow.named_verbs import queries as _queries
from commlib_tensorflow.named_verbs.operations import *
from commlib_tensorflow.named_verbs.queries import *
from commlib_tensorflow.one_bit import OneBitAdam, OneBitLAMB
from commlib_tensorflow.optimizer import DistributedOptimizer
from commlib_tensorflow.pipelines.pipeline import Pipeline, pipeline
from commlib_tensorflow.sync_batch_norm import SyncBatchNormalization
from commlib_tensorflow.tensor import (
    ParallelAttention,
    ParallelMLP,
    VocabularyCrossEntropy,
    context,
    gather_model,
    gather_weights,
    parallelize,
    streams,
    vocabulary_cross_entropy,
)

__all__ = [
    "__version__",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
    "Checkpoint",
    "Column",
    "Experts",
    "MoE",
    "OneBitAdam",
    "OneBitLAMB",
    "ParallelAttention",
    "ParallelMLP",
    "Pipeline",
    "Row",
    "Vocabulary",
    "WrappedOptimizer",
    "VocabularyCrossEntropy",
    "clip_by_global_norm",
    "context",
    "expert_stats",
    "expertize",
    "gather_model",
    "gather_weights",
    "load_experts",
    "parallelize",
    "pipeline",
    "rebalance_experts",
    "save_experts",
    "streams",
    "tensor",
    "vocabulary_cross_entropy",
]
__all__ += _horovod.__all__
__all__ += _broadcast.__all__
__all__ += _collectives.__all__
__all__ += _operations.__all__
__all__ += _queries.__all__

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
