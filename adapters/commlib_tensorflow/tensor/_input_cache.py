"""Inputs of column-sharded layers: moved once for all layers that are called with the same input one after another.

So Q, K and V, or both halves of a gated MLP, share one reduction of their input's gradient, and one gather of a sharded
sequence. This works only within one call of a model, where no tape begins or ends between two of its layers: another
tape would not see the origin of the first layer's input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import COPY
from commlib_tensorflow.tensor._call_context import current_call
from commlib_tensorflow.tensor._comparison import note_input
from commlib_tensorflow.tensor.moves import redistribute

try:  # not public; without it every layer moves its input
    from tensorflow.python.eager.record import should_record_backprop as _is_recorded
except ImportError:

    def _is_recorded(tensors: Any) -> Any:
        return object()


_LAST = "commlib_entered"


class InputCache(NamedTuple):
    """The last input that was moved in a call of a model, and its result."""

    x: Any
    axis: ParallelAxis
    sequence: int | None
    graph: Any
    result: Any

    def holds(self, x: Any, axis: ParallelAxis, sequence: int | None, graph: Any) -> bool:
        same = x is self.x and axis is self.axis and sequence == self.sequence and graph is self.graph
        # A recomputed block runs unrecorded first.
        return same and _is_recorded([x]) == _is_recorded([self.result])


def enter(layer: Any, x: Any, axis: ParallelAxis, sequence: int | None) -> Any:
    """Return the input of a column-sharded layer: unchanged, or gathered along the sequence."""
    call = current_call()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    last: InputCache | None = getattr(call, _LAST, None)
    if last is not None and last.holds(x, axis, sequence, graph):
        return last.result
    note_input(axis, layer, x, sequence=sequence)
    result = redistribute(x, axis, COPY if sequence is None else moves.gather(sequence, partial=True))
    if call is not None:
        setattr(call, _LAST, InputCache(x, axis, sequence, graph, result))
    return result
