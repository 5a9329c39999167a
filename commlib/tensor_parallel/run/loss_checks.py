"""Loss checks: refuse arguments of vocabulary_cross_entropy that do not fit, and unsharded logits.

Unsharded logits would count each word several times. They are bitwise equal on all ranks; sharded ones are of different
words on each rank. The loss exchanges the largest logits at each call, so for a few rows these identify almost all
sharded logits without another message. The remaining cases are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from commlib.comparison.agreement import digest_of
from commlib.dtypes import Array
from commlib.errors import MismatchError, UsageError
from commlib.sharding.axis import ParallelAxis

WHAT = "vocabulary_cross_entropy"

ROWS = 8
"""Number of rows whose largest logits are sent twice: equal maxima and minima over ranks mean equal logits."""

COLUMNS = 128
"""Approximate number of logits compared in each of these rows."""

_REDUCTIONS = ("mean", "sum", "none")


class TensorForm(NamedTuple):
    """The dtype and shape of an argument; a dimension, or their number, may be unknown in a graph: None."""

    dtype: str
    shape: Sequence[int | None] | None

    def __str__(self) -> str:
        return f"{self.dtype}{'[...]' if self.shape is None else list(self.shape)}"


def check_arguments(
    logits: TensorForm, target: TensorForm, weight: TensorForm | None, smoothing: float, reduction: str, plain_loss: str
) -> None:
    """Raise UsageError for arguments that do not fit each other. plain_loss: the framework's own, for errors."""
    if "float" in target.dtype:
        raise UsageError(f"{WHAT}: the target has class probabilities, expected integers: token ids")
    if weight is not None and (weight.shape is None or len(weight.shape) != 1 or "float" not in weight.dtype):
        raise UsageError(f"{WHAT}: weight is {weight}, expected a float for each token of the full vocabulary")
    shape = logits.shape or ()
    if shape and shape[-1] == 0:
        raise UsageError(
            f"{WHAT}: logits of shape {list(shape)} have no tokens, expected some on each rank: leave a vocabulary "
            f"with fewer tokens than ranks unsharded, and use {plain_loss}"
        )
    rows = shape[:-1] if target.shape is None else target.shape
    if "float" not in logits.dtype or not shape or shape[-1] is None or not _may_be_equal(shape[:-1], rows):
        raise UsageError(
            f"{WHAT}: logits of {logits} for a target of shape {list(rows)}, expected floats of shape "
            f"{[*rows, 'words of this rank']}: the vocabulary is the last dimension, of known length; move it there if "
            f"{plain_loss} has it elsewhere"
        )
    if not 0 <= smoothing <= 1:
        raise UsageError(f"{WHAT}: label_smoothing is {smoothing}, expected 0 to 1")
    if reduction not in _REDUCTIONS:
        raise UsageError(f"{WHAT}: reduction is {reduction!r}, expected {', '.join(_REDUCTIONS)}")


def _may_be_equal(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    return len(one) == len(other) and all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))


def check_vocabulary(axis: ParallelAxis, counts: Sequence[int], total: int | None, weight: int | None) -> None:
    """Raise UsageError for a vocabulary, or a weight, of another length than the logits of all ranks.

    counts: tokens of each rank. total: of the vocabulary, if known. weight: the length of the weight, if there is one.
    """
    words = sum(counts)
    if total is not None and words != total:
        raise UsageError(
            f"{WHAT} on {axis.comm.name}: the ranks have logits of {list(counts)} tokens, together {words}, expected "
            f"vocabulary={total}: do not gather them, and use the same axis for the layers of all ranks"
        )
    if weight is not None and weight != words:
        raise UsageError(
            f"{WHAT}: weight has {weight} tokens, expected the {words} of the full vocabulary, the same on every rank"
        )


def refuse_targets(outside: Any, words: int) -> None:
    """Raise UsageError for targets outside of the vocabulary. outside: an array of these, except ignored ones."""
    if len(outside):
        raise UsageError(f"{WHAT}: a target is token {int(outside[0])}, expected 0 to {words - 1}, or ignore_index")


def different_logits(axis: ParallelAxis, dtype: str, rows: int, error: MismatchError) -> MismatchError:
    """Return the error for ranks whose logits differ in rows or dtype, as found by `error`."""
    return MismatchError(
        f"{WHAT} on {axis.comm.name}: rank {axis.rank} has {dtype} logits of {rows} rows, and other ranks have others; "
        f"expected the same rows and dtype on all: {error}"
    )


def stride(words: int) -> int:
    """Return the stride of the compared logits in a row."""
    return max(1, words // COLUMNS)


def refuse_whole(axis: ParallelAxis, sample: Array, words: int) -> None:
    """Raise UsageError on all ranks if all have the same logits; `sample` is a part of them, (rows, some words).

    Rows with a single value are inconclusive: a layer that starts with zeros has such rows, sharded or not. Collective.
    words: number of words of this rank.
    """
    is_distinct = bool((sample.max(-1) > sample.min(-1)).any())
    mine = digest_of([f"{words} {sample.dtype.name} {sample.shape}", sample.tobytes().hex()]) if is_distinct else -1
    everyone = axis.comm.all_gather(np.array([mine], np.int64))
    if mine >= 0 and bool((everyone == mine).all()):
        raise UsageError(
            f"{WHAT} on {axis.comm.name}: all {axis.size} ranks have the same logits of {words} words, so they are not "
            "sharded. vocabulary= expects each rank's own words, the output of Vocabulary() without gather. Use the "
            "framework's own loss for full logits, the output of Vocabulary(gather=True), and for sharded logits that "
            "happen to be equal"
        )
