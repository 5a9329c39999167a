"""The input of layers that divide their outputs: moved once for those that are called with it one after another.

So Q, K and V, or both halves of a gated MLP, have one reduction of their input's gradient, and one gather of a divided
sequence. Only within one call of a model, which no tape begins or ends between two of its layers: another tape would
not see where the first layer's input came from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from commlib.sharding.axis import Axis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import COPY
from commlib_tensorflow.tensor._alike import given
from commlib_tensorflow.tensor._call_context import current_call
from commlib_tensorflow.tensor.moves import moved

try:  # it is not public: without it every layer moves its input
    from tensorflow.python.eager.record import should_record_backprop as _is_recorded
except ImportError:

    def _is_recorded(tensors: Any) -> Any:
        return object()


_LAST = "commlib_entered"


class _Entered(NamedTuple):
    """The last input of a call of a model that was moved, and what became of it."""

    x: Any
    axis: Axis
    sequence: int | None
    graph: Any
    result: Any

    def holds(self, x: Any, axis: Axis, sequence: int | None, graph: Any) -> bool:
        same = x is self.x and axis is self.axis and sequence == self.sequence and graph is self.graph
        # A block that is computed again in backward runs unrecorded first.
        return same and _is_recorded([x]) == _is_recorded([self.result])


def entered(layer: Any, x: Any, axis: Axis, sequence: int | None) -> Any:
    """Return the input of a layer that divides its outputs: as it is, or gathered along the sequence."""
    call = current_call()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    last: _Entered | None = getattr(call, _LAST, None)
    if last is not None and last.holds(x, axis, sequence, graph):
        return last.result
    given(axis, layer, x, sequence=sequence)
    result = moved(x, axis, COPY if sequence is None else moves.gather(sequence, partial=True))
    if call is not None:
        setattr(call, _LAST, _Entered(x, axis, sequence, graph, result))
    return result
