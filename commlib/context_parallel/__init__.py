"""Context parallelism: one sequence sharded among ranks, and attention over all of it. [pure]

A `SequenceLayout` maps ranks to positions, `document_bounds` are the boundaries of packed documents, and `steps` are
the blocks of queries and keys that a rank computes while keys and values travel around the ring of ranks. `Heads`
describes the split of heads for the other method, in which each rank has full sequences of some heads.
"""

from __future__ import annotations

from commlib.context_parallel.dropout import check_rate
from commlib.context_parallel.heads import Heads
from commlib.context_parallel.layout import ORDERS, SequenceLayout, document_bounds
from commlib.context_parallel.mask import Mask, check_key_mask
from commlib.context_parallel.ring_steps import Block, RingStep, draw, pairs, steps
from commlib.context_parallel.window import Window

__all__ = [
    "ORDERS", "Block", "Heads", "SequenceLayout", "Mask", "RingStep", "Window", "check_key_mask", "check_rate",
    "document_bounds",
    "draw", "pairs", "steps",
]  # fmt: skip
