"""Agreement of all ranks on what they are about to call: at once in eager mode, else when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib.functional.attention import Attention
from commlib.functional.axis import Axis
from commlib.functional.sequences import Terms, settle
from commlib.tensor.context import Layout
from commlib_tensorflow._graph import Spec, call_in_order, ordered


def agreed(axis: Axis, terms: Terms, x: tf.Tensor, dim: int) -> tuple[Layout, tf.Tensor]:
    """Return how the sequence is divided, and `x`, which holds this rank's tokens along `dim`. Collective.

    What a graph computes with the returned tensor comes after the agreement. Raises UsageError where a graph has to be
    told the length, and what `settle` raises.
    """
    if tf.executing_eagerly():
        return settle(axis, terms, x.shape[dim]), x
    if not ordered():
        raise UsageError(
            f"{terms.what}: nothing orders the nodes of this graph, and ranks may run them in different orders: use a "
            "tf.function"
        )
    if terms.length is None:
        raise UsageError(
            f"{terms.what}: in a graph it has to be known how long the whole sequence is: give length=, the number of "
            "tokens of all ranks"
        )
    layout = Layout(terms.length, axis.size, terms.order)
    own = layout.counts[axis.rank]
    x = _after(terms.what, lambda tokens: settle(axis, terms, tokens), x, dim)
    return layout, tf.ensure_shape(x, [*x.shape[:dim], own, *x.shape[dim + 1 :]])


def agreed_backward(what: Attention, q: tf.Tensor) -> tf.Tensor:
    """Return `q` when all ranks run the backward of this call. Collective."""
    if tf.executing_eagerly():
        what.agree_backward(q.shape[2])
        return q
    return _after("attention, backward", what.agree_backward, q, 2)


def _after(what: str, agree: Callable[[int], Any], x: tf.Tensor, dim: int) -> tf.Tensor:
    def host(tokens: Any) -> list[Any]:
        agree(int(tokens))
        return [tokens]

    (found,) = call_in_order(what, host, [tf.shape(x, tf.int64)[dim]], [Spec(tf.int64, ())])
    with tf.control_dependencies([found]):
        return tf.identity(x)
