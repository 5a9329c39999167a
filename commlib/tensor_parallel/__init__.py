"""Tensor, sequence and context parallelism: the rules, once for all frameworks. [pure]

A `Move` takes a tensor from one layout over the ranks of an axis to another, and its conjugate takes the gradient
back. A `Sharding` says which part of a weight each rank keeps. Styles (`Column`, `Row`, ...) say how a layer is
divided, a plan which layer has which style.
"""

from __future__ import annotations

from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.moves import COPY, REDUCE, Move, all_to_all, gather, reduce_scatter, scatter
from commlib.tensor_parallel.plan import Plan, resolve
from commlib.tensor_parallel.styles import Column, PerRank, Replicate, Row, Sequence, Slice, Style, Vocabulary

__all__ = [
    "COPY",
    "REDUCE",
    "Column",
    "Move",
    "PerRank",
    "Plan",
    "Replicate",
    "Row",
    "Sequence",
    "Slice",
    "Sharding",
    "Style",
    "Vocabulary",
    "all_to_all",
    "gather",
    "reduce_scatter",
    "resolve",
    "scatter",
]
