"""Tensor parallelism for PyTorch: moves, divided layers, and `parallelize` for plain models."""

from commlib_torch.tensor.linear import ColumnLinear, RowLinear
from commlib_torch.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_torch.tensor.parallelize import parallelize
from commlib_torch.tensor.verify import verify

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "all_to_all",
    "copy",
    "gather",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
    "verify",
]
