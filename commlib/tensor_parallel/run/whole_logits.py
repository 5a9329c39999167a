"""Whole logits: told from those that are divided by words, for a loss that would take each word for several.

Whole logits are the same on all ranks, to the bit; divided ones are of other words on each. Largest logits travel at
each call, so those of a few rows tell, at no message, almost all that are divided. What is left is compared.
"""

from __future__ import annotations

import numpy as np

from commlib.comparison.agreement import digest_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import Axis

ROWS = 8
"""Of so many rows ranks tell their largest logits twice: what is both the most and the least of all is each one's."""

COLUMNS = 128
"""Of each of these rows about so many logits are compared."""


def stride(words: int) -> int:
    """Return how many logits apart those of a row lie that are compared."""
    return max(1, words // COLUMNS)


def refuse_whole(axis: Axis, what: str, sample: Array, words: int) -> None:
    """Raise UsageError on all ranks if all have the same logits, of which `sample` (rows, some words) is a part.

    Rows of one value each tell nothing: those of a layer that begins with zeros are such, divided or not. Collective.
    words: how many this rank has.
    """
    tells = bool((sample.max(-1) > sample.min(-1)).any())
    mine = digest_of([f"{words} {sample.dtype.name} {sample.shape}", sample.tobytes().hex()]) if tells else -1
    everyone = axis.comm.all_gather(np.array([mine], np.int64))
    if mine >= 0 and bool((everyone == mine).all()):
        raise UsageError(
            f"{what} on {axis.comm.name}: all {axis.size} ranks have the same logits of {words} words, so these are "
            "whole, expected each rank's own words, as Vocabulary() without gather leaves them: whole logits, as "
            "Vocabulary(gather=True) makes them, are for the framework's own loss; vocabulary= is for such as are "
            "divided, and equal all the same"
        )
