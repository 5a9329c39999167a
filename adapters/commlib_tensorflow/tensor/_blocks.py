"""Attention of some queries to some keys, and its gradients, in the dtype of sums: float32, or float64 for float64.

Stats of scores are those of `commlib.context_parallel.ring`: what is seen is asked of a `Sight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from commlib_tensorflow.tensor._sight import Sight


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, scale: float, sight: Sight) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the result, zeros where no key is seen, and the scores' stats, (batch, heads, tokens, 2)."""
    served = q.shape[1] // k.shape[1]
    scores, values = _scores(q, k, scale, sight), _summed(v)
    largest = tf.reduce_max(scores, -1, keepdims=True)
    weights = tf.exp(scores - finite(largest))
    total = tf.reduce_sum(weights, -1, keepdims=True)
    found = tf.matmul(sight.drop(weights, served), values) / tf.maximum(total, 1)
    return _apart(found, q), _apart(tf.concat([largest, total], -1), q)


def gradients(
    gradient: tf.Tensor,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    out: tf.Tensor,
    stats: tf.Tensor,
    scale: float,
    sight: Sight,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of q, k and v, and of the scores as (batch, heads, queries, keys).

    out, stats: over all keys, of which these are a part.
    """
    served = q.shape[1] // k.shape[1]
    gradient, out, stats = (_by_keys(_summed(x), k) for x in (gradient, out, stats))
    largest, total = tf.split(stats, 2, -1)
    weights = tf.exp(_scores(q, k, scale, sight) - finite(largest)) / tf.maximum(total, 1)
    of_weights = sight.drop(tf.matmul(gradient, _summed(v), transpose_b=True), served)
    of_scores = weights * (of_weights - tf.reduce_sum(gradient * out, -1, keepdims=True))
    of_q = _apart(tf.matmul(of_scores, _summed(k)) * scale, q)
    of_k = tf.matmul(of_scores, _by_keys(_summed(q), k), transpose_a=True) * scale
    of_v = tf.matmul(sight.drop(weights, served), gradient, transpose_a=True)
    return of_q, of_k, of_v, _apart(of_scores, q)


def finite(largest: tf.Tensor) -> tf.Tensor:
    """Return the largest scores, where there is none the least number: no score less it is then NaN."""
    return tf.maximum(largest, largest.dtype.min)


def _scores(q: tf.Tensor, k: tf.Tensor, scale: float, sight: Sight) -> tf.Tensor:
    """Return (batch, heads of k, queries of all heads that one serves, keys)."""
    scores = tf.matmul(_by_keys(_summed(q), k), _summed(k), transpose_b=True) * scale
    return sight.hide(scores, q.shape[1] // k.shape[1])


def _by_keys(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Put the heads that one head of k serves behind one another: products with k then add up over them."""
    return tf.reshape(x, [*batch_of(x), k.shape[1], x.shape[1] // k.shape[1] * x.shape[2], x.shape[3]])


def _apart(x: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [*batch_of(x), q.shape[1], q.shape[2], x.shape[3]])


def _summed(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)


def batch_of(x: tf.Tensor) -> Sequence[int | tf.Tensor]:
    """Return the batch dimension: a tensor where it is not known yet. Of nothing, it cannot be left out as -1."""
    return [tf.shape(x)[0] if x.shape[0] is None else x.shape[0]]
