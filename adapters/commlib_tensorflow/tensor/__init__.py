"""Tensor and context parallelism for TensorFlow and Keras: collectives with gradients, sharded layers, attention."""

import typing as _typing

from commlib.arguments import missing_attribute as _missing_attribute
from commlib.tensor_parallel import Column, PerRank, Plan, Replicate, Row, Sequence, Vocabulary
from commlib_tensorflow.tensor import context, streams
from commlib_tensorflow.tensor.blocks import ParallelAttention, ParallelMLP
from commlib_tensorflow.tensor.cross_entropy import VocabularyCrossEntropy, vocabulary_cross_entropy
from commlib_tensorflow.tensor.dense import ColumnDense, RowDense, VocabularyDense
from commlib_tensorflow.tensor.einsum import ColumnEinsumDense, RowEinsumDense
from commlib_tensorflow.tensor.embedding import ColumnEmbedding, VocabularyEmbedding
from commlib_tensorflow.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_tensorflow.tensor.parallelize import parallelize
from commlib_tensorflow.tensor.state import gather_model, gather_weights, set_weights
from commlib_tensorflow.tensor.streams import dropout, seed
from commlib_tensorflow.tensor.verify import verify

__all__ = [
    "Column",
    "ColumnDense",
    "ColumnEinsumDense",
    "ColumnEmbedding",
    "ParallelAttention",
    "ParallelMLP",
    "PerRank",
    "Plan",
    "Replicate",
    "Row",
    "RowDense",
    "RowEinsumDense",
    "Sequence",
    "Vocabulary",
    "VocabularyCrossEntropy",
    "VocabularyDense",
    "VocabularyEmbedding",
    "all_to_all",
    "context",
    "copy",
    "dropout",
    "gather",
    "gather_model",
    "gather_weights",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
    "seed",
    "set_weights",
    "streams",
    "verify",
    "vocabulary_cross_entropy",
]

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
