"""Attention of some queries to some keys, and its gradients, accumulated in float32, or float64 for float64.

Statistics of scores are as in `commlib.context_parallel.ring`; a `BlockMask` decides which keys are visible.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from commlib_tensorflow.tensor._block_masks import BlockMask


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, scale: float, sight: BlockMask) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the result, zeros where no key is visible, and the scores' stats, (batch, heads, tokens, 2)."""
    served = q.shape[1] // k.shape[1]
    scores, values = _scores(q, k, scale, sight), _accumulation_cast(v)
    largest = tf.reduce_max(scores, -1, keepdims=True)
    weights = tf.exp(scores - finite(largest))
    total = tf.reduce_sum(weights, -1, keepdims=True)
    result = tf.matmul(sight.drop(weights, served), values) / tf.maximum(total, 1)
    return _ungroup(result, q), _ungroup(tf.concat([largest, total], -1), q)


def gradients(
    gradient: tf.Tensor,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    out: tf.Tensor,
    stats: tf.Tensor,
    scale: float,
    sight: BlockMask,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of q, k and v, and of the scores as (batch, heads, queries, keys).

    out, stats: over all keys; these keys are some of them.
    """
    served = q.shape[1] // k.shape[1]
    gradient, out, stats = (_group_by_keys(_accumulation_cast(x), k) for x in (gradient, out, stats))
    largest, total = tf.split(stats, 2, -1)
    weights = tf.exp(_scores(q, k, scale, sight) - finite(largest)) / tf.maximum(total, 1)
    of_weights = sight.drop(tf.matmul(gradient, _accumulation_cast(v), transpose_b=True), served)
    of_scores = weights * (of_weights - tf.reduce_sum(gradient * out, -1, keepdims=True))
    of_q = _ungroup(tf.matmul(of_scores, _accumulation_cast(k)) * scale, q)
    of_k = tf.matmul(of_scores, _group_by_keys(_accumulation_cast(q), k), transpose_a=True) * scale
    of_v = tf.matmul(sight.drop(weights, served), gradient, transpose_a=True)
    return of_q, of_k, of_v, _ungroup(of_scores, q)


def finite(largest: tf.Tensor) -> tf.Tensor:
    """Return the largest scores; where all keys are hidden, the lowest finite number, to avoid NaN differences."""
    return tf.maximum(largest, largest.dtype.min)


def _scores(q: tf.Tensor, k: tf.Tensor, scale: float, sight: BlockMask) -> tf.Tensor:
    """Return (batch, heads of k, queries of all heads that share a head of k, keys)."""
    scores = tf.matmul(_group_by_keys(_accumulation_cast(q), k), _accumulation_cast(k), transpose_b=True) * scale
    return sight.hide(scores, q.shape[1] // k.shape[1])


def _group_by_keys(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Concatenate the queries of all heads that share a head of k: products with k then sum over them."""
    return tf.reshape(x, [*batch_of(x), k.shape[1], x.shape[1] // k.shape[1] * x.shape[2], x.shape[3]])


def _ungroup(x: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [*batch_of(x), q.shape[1], q.shape[2], x.shape[3]])


def _accumulation_cast(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)


def batch_of(x: tf.Tensor) -> Sequence[int | tf.Tensor]:
    """Return the batch dimension: a tensor if it is unknown. For empty tensors -1 would be ambiguous."""
    return [tf.shape(x)[0] if x.shape[0] is None else x.shape[0]]
