"""Tensor and context parallelism for TensorFlow and Keras: moves, divided layers, `parallelize`, attention."""

from commlib_tensorflow.tensor import context
from commlib_tensorflow.tensor.dense import ColumnDense, RowDense
from commlib_tensorflow.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_tensorflow.tensor.parallelize import parallelize

__all__ = [
    "ColumnDense",
    "RowDense",
    "all_to_all",
    "context",
    "copy",
    "gather",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
]
