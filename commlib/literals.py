"""Words that arguments take, as types: a checker refuses a misspelled one. [pure]

Each is also checked when the call runs. Objects that a program registers itself, such as an algorithm or a schedule,
have names that are not here; pass those with `typing.cast`.
"""

from __future__ import annotations

from typing import Literal

Op = Literal["sum", "mean", "min", "max", "prod", "and", "or"]
"""Operations of reductions. "and" and "or" are for integers."""

ScanOp = Literal["sum", "min", "max", "prod", "and", "or"]
"""Operations of scans, in which each rank combines a different number of arrays."""

AveragingOp = Literal["mean", "sum"]
"""Operations on gradients."""

SplitWord = Literal["auto", "time"]
"""Words for the layers of a pipeline's stages."""

AlgorithmName = Literal[
    "auto",
    "native", "node", "hierarchical",
    "nccl", "messages", "host",
    "binomial_tree", "bruck", "chain", "direct", "dissemination", "double_tree", "halving_doubling", "pairwise",
    "recursive_doubling", "recursive_halving", "ring",
]  # fmt: skip
"""Values of `algorithm=`: "auto", the paths of the host, those of devices, and the schedules."""

ScheduleName = Literal[
    "auto", "1f1b", "breadth_first", "dualpipev", "gpipe", "interleaved", "pipedream", "pipedream_2bw", "zb_h1", "zb_v"
]
"""Schedules of a pipeline. A checker accepts the path of a schedule's file as a `pathlib.Path` only."""

CheckpointMode = Literal["none", "selective", "full"]
"""The part of a stage's or layer's forward that its backward recomputes: none, all except products, all."""

BatchNormMode = Literal["microbatch", "batch"]
"""The rows whose statistics a batch norm in a pipeline uses."""

SequenceOrder = Literal["balanced", "contiguous"]
"""The layout of a sequence over the ranks of an axis."""

AttentionMethod = Literal["ring", "all_to_all"]
"""The exchange of attention over a sharded sequence."""
