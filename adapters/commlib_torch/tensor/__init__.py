"""Tensor and context parallelism for PyTorch: redistribution, sharded layers, `parallelize`, attention."""

import typing as _typing

from commlib.arguments import missing_attribute as _missing_attribute
from commlib.tensor_parallel import Column, PerRank, Plan, Replicate, Row, Sequence, Slice, Vocabulary
from commlib_torch._shards import shard_of
from commlib_torch.tensor import context, streams
from commlib_torch.tensor.attention import ColumnAttention
from commlib_torch.tensor.conv import ColumnConv1d, ColumnConv2d, ColumnConv3d, RowConv1d, RowConv2d, RowConv3d
from commlib_torch.tensor.cross_entropy import vocabulary_cross_entropy
from commlib_torch.tensor.embedding import ColumnEmbedding, VocabularyEmbedding
from commlib_torch.tensor.linear import ColumnLinear, RowLinear, VocabularyLinear
from commlib_torch.tensor.mlp import ParallelMLP
from commlib_torch.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_torch.tensor.parallel_attention import ParallelAttention
from commlib_torch.tensor.parallelize import parallelize
from commlib_torch.tensor.sequence import SequenceLayerNorm, SequenceRMSNorm
from commlib_torch.tensor.state import gather_optimizer_state, gather_state_dict, load_optimizer_state
from commlib_torch.tensor.verify import verify

__all__ = [
    "Column",
    "ColumnAttention",
    "ColumnConv1d",
    "ColumnConv2d",
    "ColumnConv3d",
    "ColumnEmbedding",
    "ColumnLinear",
    "ParallelAttention",
    "ParallelMLP",
    "PerRank",
    "Plan",
    "Replicate",
    "Row",
    "RowConv1d",
    "RowConv2d",
    "RowConv3d",
    "RowLinear",
    "Sequence",
    "SequenceLayerNorm",
    "SequenceRMSNorm",
    "Slice",
    "Vocabulary",
    "VocabularyEmbedding",
    "VocabularyLinear",
    "all_to_all",
    "context",
    "copy",
    "gather",
    "gather_optimizer_state",
    "gather_state_dict",
    "load_optimizer_state",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shard_of",
    "streams",
    "verify",
    "vocabulary_cross_entropy",
]

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
