"""Agreement of all ranks on what they are about to call: at once in eager mode, else when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.context_parallel import Layout
from commlib.context_parallel.attention import Attention
from commlib.context_parallel.sequences import Terms, settle_with
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib_tensorflow._graph import Spec, call_in_order, ordered


def agreed(axis: Axis, terms: Terms, x: tf.Tensor, dim: int, number: Any = 0) -> tuple[Layout, tf.Tensor, Any]:
    """Return how the sequence is divided, `x`, which holds this rank's tokens along `dim`, and the first rank's number.

    Collective. number: of int64, in a graph a tensor.
    What a graph computes with the returned tensor comes after the agreement. Raises UsageError where a graph has to be
    told the length, and what `settle` raises.
    """
    if tf.executing_eagerly():
        layout, number = settle_with(axis, terms, x.shape[dim], int(number))
        return layout, x, number
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
    x, number = _after(terms.what, lambda *given: settle_with(axis, terms, *given)[1], x, dim, number)
    return layout, tf.ensure_shape(x, [*x.shape[:dim], own, *x.shape[dim + 1 :]]), number


def agreed_backward(what: Attention, q: tf.Tensor) -> tf.Tensor:
    """Return `q` when all ranks run the backward of this call. Collective."""
    if tf.executing_eagerly():
        what.agree_backward(q.shape[2])
        return q
    return _after("attention, backward", lambda tokens, _: what.agree_backward(tokens), q, 2)[0]


def _after(what: str, agree: Callable[[int, int], Any], x: tf.Tensor, dim: int, number: Any = 0) -> tuple[Any, Any]:
    """Return x, and what the ranks agree on, of the tokens and the number of each."""

    def host(tokens: Any, number: Any) -> list[Any]:
        return [np.array(agree(int(tokens), int(number)) or 0, np.int64)]

    inputs = [tf.shape(x, tf.int64)[dim], tf.cast(number, tf.int64)]
    (found,) = call_in_order(what, host, inputs, [Spec(tf.int64, ())])
    with tf.control_dependencies([found]):
        return tf.identity(x), found
