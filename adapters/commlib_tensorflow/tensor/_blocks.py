"""Attention of some queries to some keys, and its gradients, in the dtype of sums: float32, or float64 for float64."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, scale: float, causal: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the result, and the scores' log-sum-exp as (batch, heads, tokens, 1). causal: as many queries as keys."""
    scores, values = _scores(q, k, scale, causal), _summed(v)
    largest = tf.reduce_max(scores, -1, keepdims=True)
    weights = tf.exp(scores - largest)
    total = tf.reduce_sum(weights, -1, keepdims=True)
    return _apart(tf.matmul(weights, values) / total, q), _apart(largest + tf.math.log(total), q)


def gradients(
    gradient: tf.Tensor,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    out: tf.Tensor,
    lse: tf.Tensor,
    scale: float,
    causal: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of q, k and v. out, lse: over all keys, of which these are a part."""
    gradient, out, lse = (_by_keys(_summed(x), k) for x in (gradient, out, lse))
    weights = tf.exp(_scores(q, k, scale, causal) - lse)
    of_weights = tf.matmul(gradient, _summed(v), transpose_b=True)
    of_scores = weights * (of_weights - tf.reduce_sum(gradient * out, -1, keepdims=True)) * scale
    of_q = _apart(tf.matmul(of_scores, _summed(k)), q)
    of_k = tf.matmul(of_scores, _by_keys(_summed(q), k), transpose_a=True)
    return of_q, of_k, tf.matmul(weights, gradient, transpose_a=True)


def _scores(q: tf.Tensor, k: tf.Tensor, scale: float, causal: bool) -> tf.Tensor:
    """Return (batch, heads of k, queries of all heads that one serves, keys)."""
    scores = tf.matmul(_by_keys(_summed(q), k), _summed(k), transpose_b=True) * scale
    if not causal:
        return scores
    tokens = q.shape[2]
    seen = tf.tile(tf.linalg.band_part(tf.ones([tokens, tokens], tf.bool), -1, 0), [q.shape[1] // k.shape[1], 1])
    return tf.where(seen, scores, tf.constant(-float("inf"), scores.dtype))


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
