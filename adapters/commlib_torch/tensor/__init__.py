"""Tensor and context parallelism for PyTorch: moves, divided layers, `parallelize` for plain models, attention."""

from commlib_torch.tensor import context
from commlib_torch.tensor.linear import ColumnLinear, RowLinear
from commlib_torch.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_torch.tensor.parallelize import parallelize

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "all_to_all",
    "context",
    "copy",
    "gather",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
]
