"""Tensor, sequence and context parallelism: the rules, for all frameworks. [pure]

A `Redistribute` takes a tensor from one layout over the ranks of an axis to another, and its conjugate takes the
gradient back. A `Sharding` describes the shard of a weight on each rank. Styles (`Column`, `Row`, ...) describe the
sharding of a layer, a plan maps layers to styles.
"""

from __future__ import annotations

from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.moves import COPY, REDUCE, Redistribute, all_to_all, gather, reduce_scatter, scatter
from commlib.tensor_parallel.plan import Plan, resolve
from commlib.tensor_parallel.styles import Column, PerRank, Replicate, Row, Sequence, Slice, Style, Vocabulary

__all__ = [
    "COPY",
    "REDUCE",
    "Column",
    "Redistribute",
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
