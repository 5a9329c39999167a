"""Context parallelism: one sequence divided among ranks, and attention over all of it. [pure]

A `Layout` says which positions each rank has, `document_bounds` where one packed document ends and the next begins, and
`steps` which blocks of queries and keys a rank computes while keys and values travel round the ring of ranks. `Heads`
says how heads are divided for the other method, in which each rank has whole sequences of some heads.
"""

from __future__ import annotations

from commlib.context_parallel.dropping import check_rate
from commlib.context_parallel.heads import Heads
from commlib.context_parallel.layout import ORDERS, Layout, document_bounds
from commlib.context_parallel.mask import Mask, check_key_mask
from commlib.context_parallel.picture import draw
from commlib.context_parallel.steps import Block, Step, pairs, steps
from commlib.context_parallel.window import Window

__all__ = [
    "ORDERS", "Block", "Heads", "Layout", "Mask", "Step", "Window", "check_key_mask", "check_rate", "document_bounds",
    "draw", "pairs", "steps",
]  # fmt: skip
