"""Logits check: refuse unsharded logits in the loss for sharded ones, which would count each word several times.

Unsharded logits are bitwise equal on all ranks; sharded ones are of different words on each rank. The loss exchanges
the largest logits at each call, so for a few rows these identify almost all sharded logits without another message.
The remaining cases are compared.
"""

from __future__ import annotations

import numpy as np

from commlib.comparison.agreement import digest_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis

ROWS = 8
"""Number of rows whose largest logits are sent twice: equal maxima and minima over ranks mean equal logits."""

COLUMNS = 128
"""Approximate number of logits compared in each of these rows."""


def stride(words: int) -> int:
    """Return the stride of the compared logits in a row."""
    return max(1, words // COLUMNS)


def refuse_whole(axis: ParallelAxis, what: str, sample: Array, words: int) -> None:
    """Raise UsageError on all ranks if all have the same logits; `sample` is a part of them, (rows, some words).

    Rows with a single value are inconclusive: a layer that starts with zeros has such rows, sharded or not. Collective.
    words: number of words of this rank.
    """
    tells = bool((sample.max(-1) > sample.min(-1)).any())
    mine = digest_of([f"{words} {sample.dtype.name} {sample.shape}", sample.tobytes().hex()]) if tells else -1
    everyone = axis.comm.all_gather(np.array([mine], np.int64))
    if mine >= 0 and bool((everyone == mine).all()):
        raise UsageError(
            f"{what} on {axis.comm.name}: all {axis.size} ranks have the same logits of {words} words, so they are not "
            "sharded. vocabulary= expects each rank's own words, the output of Vocabulary() without gather. Use the "
            "framework's own loss for full logits, the output of Vocabulary(gather=True), and for sharded logits that "
            "happen to be equal"
        )
