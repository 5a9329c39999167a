"""Agreement of all ranks on a call before it runs: at once in eager mode, at run time in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.context_parallel import SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.context_parallel.sequences import SequenceSpec, settle_with
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib_tensorflow._host_calls import Spec, call_in_order, is_ordered


def agree_on_sequence(
    axis: ParallelAxis, terms: SequenceSpec, x: tf.Tensor, dim: int, number: Any = 0
) -> tuple[SequenceLayout, tf.Tensor, Any]:
    """Return the sequence layout, `x` (this rank's tokens along `dim`), and the first rank's number. Collective.

    number: int64, in a graph a tensor. Graph operations on the returned tensor run after the agreement. Raises
    UsageError if a graph lacks the sequence length, and the errors of `settle`.
    """
    if tf.executing_eagerly():
        layout, number = settle_with(axis, terms, x.shape[dim], int(number))
        return layout, x, number
    if not is_ordered():
        raise UsageError(
            f"{terms.what}: nothing orders the nodes of this graph, so ranks may run them in different orders: use a "
            "tf.function"
        )
    if terms.length is None:
        raise UsageError(
            f"{terms.what}: a graph needs the length of the whole sequence: give length=, the total number of tokens "
            "of all ranks"
        )
    layout = SequenceLayout(terms.length, axis.size, terms.order)
    own = layout.counts[axis.rank]
    x, number = _agree_before(terms.what, lambda *given: settle_with(axis, terms, *given)[1], x, dim, number)
    return layout, tf.ensure_shape(x, [*x.shape[:dim], own, *x.shape[dim + 1 :]]), number


def agree_on_backward(what: AttentionCall, q: tf.Tensor) -> tf.Tensor:
    """Return `q` after all ranks have agreed to run the backward of this call. Collective."""
    if tf.executing_eagerly():
        what.agree_backward(q.shape[2])
        return q
    return _agree_before("attention, backward", lambda tokens, _: what.agree_backward(tokens), q, 2)[0]


def _agree_before(
    what: str, agree: Callable[[int, int], Any], x: tf.Tensor, dim: int, number: Any = 0
) -> tuple[Any, Any]:
    """Return x, and the number the ranks agree on, given each rank's tokens and number."""

    def host(tokens: Any, number: Any) -> list[Any]:
        return [np.array(agree(int(tokens), int(number)) or 0, np.int64)]

    inputs = [tf.shape(x, tf.int64)[dim], tf.cast(number, tf.int64)]
    (answer,) = call_in_order(what, host, inputs, [Spec(tf.int64, ())])
    with tf.control_dependencies([answer]):
        return tf.identity(x), answer
