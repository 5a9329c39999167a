"""Cross-entropy of logits that are sharded by vocabulary, by the algorithm of `commlib.tensor_parallel.vocabulary`."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from commlib.comparison.agreement import digest_of, make_or_refuse
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import MismatchError
from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.run.loss_checks import (
    ROWS,
    WHAT,
    TensorForm,
    check_arguments,
    check_vocabulary,
    different_logits,
    refuse_targets,
    refuse_whole,
    stride,
)
from commlib_tensorflow._bridge import Array, as_tensor
from commlib_tensorflow._host_calls import Spec, call_in_order, no_autograph, refuse_vectorized
from commlib_tensorflow.tensor.moves import axis_of, redistribute


@no_autograph
def vocabulary_cross_entropy(
    logits: Any,
    target: Any,
    ranks: AxisRanks,
    *,
    weight: Any = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocabulary: int | None = None,
) -> tf.Tensor:
    """Return the cross-entropy of logits whose vocabulary is sharded over the ranks of an axis.

    Like PyTorch's over the last dimension.

    Collective: two reductions of a few numbers for each row; none in the backward.

    Targets and weights are the same on every rank.

    Returns float32, or float64 for float64 logits: the sum, or the weighted mean, over the rows that are not ignored
    (nan if there are none), or with "none" the loss of each row (...), 0 for ignored rows.

    Args:
        logits: (..., this rank's tokens), of any floating dtype.
        target: Token ids (...), of the full vocabulary.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        weight: One number for each token of the full vocabulary, without a gradient.
        ignore_index: The target whose rows do not count; None: none.
        label_smoothing: The share of the target that is spread over all tokens, 0 to 1.
        reduction: "mean", "sum" or "none".
        vocabulary: The total number of tokens, to check it.

    Raises:
        UsageError: On all ranks, also for unsharded logits (the same on all ranks; not checked if `vocabulary` is
            given, which rules them out).
        MismatchError: If ranks have different targets, weights or options.
    """
    refuse_vectorized()
    logits, target = (as_tensor(x, WHAT) for x in (logits, target))
    shared = axis_of(ranks.comm if isinstance(ranks, ParallelAxis) else ranks, WHAT)  # a codec must not change sums
    weight = None if weight is None else tf.stop_gradient(tf.convert_to_tensor(weight))
    given, of_weight = (_form_of(logits), _form_of(target)), None if weight is None else _form_of(weight)

    def check() -> None:
        check_arguments(*given, of_weight, label_smoothing, reduction, plain_loss="Keras' loss")

    if tf.executing_eagerly():
        make_or_refuse(shared.comm, WHAT, check)
    else:
        check()
    wide = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    words = wide.shape[-1]
    x, rows = tf.reshape(wide, [-1, words]), tf.reshape(tf.cast(target, tf.int64), [-1])
    is_ignored = tf.zeros_like(rows, tf.bool) if ignore_index is None else rows == ignore_index
    options = {
        "dtype": logits.dtype.name, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
        "reduction": reduction, "vocabulary": vocabulary,
    }  # fmt: skip
    most, start, total = _shared_maximum(x, rows, weight, ignore_index, shared, options)
    # The loss does not depend on the subtracted value, so it needs no gradient.
    x = x - tf.stop_gradient(most)[:, tf.newaxis]
    is_own = (rows >= start) & (rows < start + words) & ~is_ignored
    own = tf.where(is_own, rows - start, 0)
    sums = [tf.reduce_sum(tf.exp(x), -1), tf.where(is_own, tf.gather(x, own, batch_dims=1), 0)]
    counted: Any = tf.cast(~is_ignored, x.dtype)
    if weight is not None:
        weight = tf.cast(weight, x.dtype)
        counted *= tf.gather(weight, tf.where(is_ignored, tf.zeros_like(rows), rows))
    if label_smoothing:
        sums.append(tf.reduce_sum(x if weight is None else x * weight[start : start + words], -1))
    totals = tf.unstack(redistribute(tf.stack(sums), shared, REDUCE), num=len(sums))
    logarithm, each = tf.math.log(totals[0]), label_smoothing / tf.cast(total, x.dtype)
    losses = (1 - label_smoothing) * counted * (logarithm - totals[1])
    if label_smoothing:
        of_all = tf.cast(total, x.dtype) if weight is None else tf.reduce_sum(weight)
        losses += each * (of_all * logarithm - totals[2])
    losses = tf.where(is_ignored, tf.zeros_like(losses), losses)
    if reduction == "none":
        return tf.reshape(losses, tf.shape(target))
    whole = tf.reduce_sum(losses)
    return whole if reduction == "sum" else whole / tf.reduce_sum(counted)


class VocabularyCrossEntropy(keras.losses.Loss):  # type: ignore[misc]  # Keras has no types
    """The loss of a model with logits sharded by vocabulary, like `SparseCategoricalCrossentropy(from_logits=True)`.

    y_true: token ids (...), or (..., 1). y_pred: (..., this rank's tokens).

    Args:
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        ignore_index: Like Keras' `ignore_class`, a token whose rows do not count in the mean.
        label_smoothing: The share of the target that is spread over all tokens, 0 to 1.
        weight: One number for each token of the full vocabulary; it multiplies losses as `sample_weight` does, so
            Keras' mean is over rows. Metrics of the model would see only some of the tokens.
        vocabulary: The size of the full vocabulary, to be checked.
        reduction: "mean", "sum" or "none".
        name: The name of the loss.
        dtype: The dtype of the loss.

    Examples:
        model.compile("adam", ct.VocabularyCrossEntropy(mesh["tp"]))
    """

    def __init__(
        self,
        ranks: AxisRanks,
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        weight: Any = None,
        vocabulary: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "vocabulary_cross_entropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.divided_axis, self.ignore_index = axis_of(ranks, "VocabularyCrossEntropy"), ignore_index
        self.label_smoothing, self.weight, self.vocabulary = label_smoothing, weight, vocabulary

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each row."""
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = tf.squeeze(y_true, -1)
        words = tf.cast(tf.round(y_true), tf.int64)  # Keras converts them to floats
        losses = vocabulary_cross_entropy(
            y_pred,
            words,
            self.divided_axis,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
            vocabulary=self.vocabulary,
        )
        if self.ignore_index is not None:
            losses._keras_mask = words != self.ignore_index  # Keras looks here for the rows that count in the mean
        return losses


def _shared_maximum(
    x: tf.Tensor, target: tf.Tensor, weight: Any, ignored: int | None, axis: ParallelAxis, options: dict[str, Any]
) -> Any:
    """Return the largest logit of each row, this rank's first token, and the total number of tokens.

    The message includes digests of the ranks' options and targets: MismatchError on all ranks if these differ,
    UsageError if the logits do not differ.
    """
    lines = [f"{name}: {value}" for name, value in options.items()]

    def host(mine: Array, words: Array, sample: Array, *weights: Array) -> list[Array]:
        given = [
            f"weight: {_digest(weights[0]) if weights else 'none'}",
            f"target, {len(words)} rows: {_digest(words)}",
        ]
        # For each rank its number of tokens, and a 24-bit digest of its arguments: both are exact in float32.
        by_rank = np.zeros((2, axis.size), mine.dtype)
        by_rank[:, axis.rank] = mine[-1], digest_of([*lines, *given]) % 2**24
        own, rows = int(mine[-1]), len(sample)
        mine = np.concatenate((mine[:-1], -mine[:rows], by_rank.ravel()))
        if axis.size > 1:
            try:
                mine = axis.comm.all_reduce(mine, "max", out=axis.empty(mine.shape, mine.dtype))
            except MismatchError as error:
                raise different_logits(axis, options["dtype"], len(words), error) from error
        counts, digests = mine[-2 * axis.size :].reshape(2, axis.size).astype(np.int64).tolist()
        if len(set(digests)) > 1:
            check_agreement(axis.comm, f"{WHAT} on {axis.comm.name}", [*lines, *given])
        check_vocabulary(axis, counts, options["vocabulary"], len(weights[0]) if weights else None)
        known = words if ignored is None else words[words != ignored]
        refuse_targets(known[(known < 0) | (known >= sum(counts))], sum(counts))
        most, least = mine[: len(words)], -mine[len(words) : len(words) + rows]
        if options["vocabulary"] is None and axis.size > 1 and rows and np.array_equal(most[:rows], least):
            refuse_whole(axis, sample, own)
        place = np.array([sum(counts[: axis.rank]), sum(counts)], np.int64)
        return [np.ascontiguousarray(most), place]

    mine = tf.concat([tf.reduce_max(tf.stop_gradient(x), -1), [tf.cast(tf.shape(x)[-1], x.dtype)]], 0)
    sample = tf.stop_gradient(x[:ROWS, :: stride(x.shape[-1])])
    inputs = [mine, target, sample, *([] if weight is None else [weight])]
    most, place = call_in_order(WHAT, host, inputs, [Spec(x.dtype, x.shape[:1]), Spec(tf.int64, (2,))])
    return most, place[0], place[1]


def _digest(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _form_of(x: tf.Tensor) -> TensorForm:
    return TensorForm(x.dtype.name, None if x.shape.rank is None else x.shape.as_list())
