"""Tensor parallelism for PyTorch: moves, divided layers, and `parallelize` for plain models."""

from commlib_torch.tensor.linear import ColumnLinear, RowLinear
from commlib_torch.tensor.moves import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from commlib_torch.tensor.parallelize import parallelize
from commlib_torch.tensor.state import gather_optimizer_state, gather_state_dict, load_optimizer_state

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "all_to_all",
    "copy",
    "gather",
    "gather_optimizer_state",
    "gather_state_dict",
    "load_optimizer_state",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
]
