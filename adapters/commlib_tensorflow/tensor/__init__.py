"""Tensor parallelism for TensorFlow and Keras: moves, divided layers, and `parallelize` for plain models."""

from commlib_tensorflow.tensor.dense import ColumnDense, RowDense
from commlib_tensorflow.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_tensorflow.tensor.parallelize import parallelize
from commlib_tensorflow.tensor.verify import verify

__all__ = [
    "ColumnDense",
    "RowDense",
    "all_to_all",
    "copy",
    "gather",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
    "verify",
]
