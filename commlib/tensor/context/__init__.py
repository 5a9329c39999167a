"""Context parallelism: one sequence divided among ranks, and attention over all of it. [pure]

A `Layout` says which positions each rank has, `document_bounds` where one packed document ends and the next begins, and
`steps` which blocks of queries and keys a rank computes while keys and values travel round the ring of ranks. `Heads`
says how heads are divided for the other method, in which each rank has whole sequences of some heads.
"""

from __future__ import annotations

from commlib.tensor.context.dropping import check_rate
from commlib.tensor.context.heads import Heads
from commlib.tensor.context.layout import ORDERS, Layout, document_bounds
from commlib.tensor.context.mask import Mask, check_key_mask
from commlib.tensor.context.picture import draw
from commlib.tensor.context.steps import Block, Step, pairs, steps
from commlib.tensor.context.window import Window

__all__ = [
    "ORDERS", "Block", "Heads", "Layout", "Mask", "Step", "Window", "check_key_mask", "check_rate", "document_bounds",
    "draw", "pairs", "steps",
]  # fmt: skip
