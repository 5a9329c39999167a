"""Equality samples around sharded layers of Keras: record values that must be equal on all ranks.

See `commlib.tensor_parallel.checks.axis_equality`. Eager values are recorded at once. In a graph tensors are recorded,
and evaluated only in steps that compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from commlib.comparison.gradient_comparison import MOST
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.axis_equality import AxisWatch, Note, note_tensor, whole_shape
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._host_calls import is_recording

_NOTES = "_commlib_alike"
_GRADIENTS = 4
"""Maximum number of gradients kept in a graph until the optimizer's step; the last outputs' come first."""


class TensorNote(NamedTuple):
    """A graph tensor that must be equal on all ranks. sequence: the sharded dimension, None if it is not sharded."""

    axis: ParallelAxis
    what: str
    layer: str
    tensor: Any
    sequence: int | None
    is_gradient: bool

    def read(self) -> list[Any]:
        """Return the tensors from which `note` makes a sample on the host."""
        x = self.tensor
        flat = tf.reshape(x, [-1])
        if x.dtype.is_floating or x.dtype.is_complex:
            flat = flat[:: tf.bitwise.bitwise_or(-(-tf.size(flat) // MOST), 1)]
        if x.dtype in (tf.bfloat16, tf.float16):
            flat = tf.cast(flat, tf.float32)
        if self.sequence is None:
            return [flat]
        length = x.shape[self.sequence] if x.shape[self.sequence] is not None else tf.shape(x)[self.sequence]
        first = tf.gather(x, tf.zeros([length], tf.int32), axis=self.sequence)
        return [flat, tf.reduce_any(x != first)]

    def note(self, sample: Array, differs: Any = True) -> Note:
        """Return a sample of the values that were read."""
        return note_tensor(
            self.what,
            self.layer,
            whole_shape(self.tensor.shape, self.sequence),
            str(self.tensor.dtype.name),
            np.asarray(sample),
            is_gradient=self.is_gradient,
            is_part=self.sequence is not None,
            positions_differ=bool(differs),
        )


def note_input(axis: ParallelAxis, layer: Any, x: Any, what: str = "the input", sequence: int | None = None) -> None:
    """Record the input of a sharded layer: unsharded, or this rank's shard along `sequence`."""
    if axis.watch is not None and x is not None:
        _note(axis, what if sequence is None else f"its part of a sequence, {what}", layer, x, sequence)


def note_gradient(axis: ParallelAxis, layer: Any, gradient: Any) -> None:
    """Record the gradient of a sharded layer's unsharded output."""
    if axis.watch is not None and layer is not None:
        _note(axis, "the gradient of the output", layer, gradient, None, is_gradient=True)


def _note(
    axis: ParallelAxis, what: str, layer: Any, x: Any, sequence: int | None, *, is_gradient: bool = False
) -> None:
    watch: AxisWatch = axis.watch
    if watch.is_hidden or not tf.is_tensor(x):
        return
    tensor_note = TensorNote(axis, what, layer.path, x, sequence, is_gradient)
    if tf.executing_eagerly():
        if watch.takes and (is_gradient or is_recording()):
            watch.notes.append(tensor_note.note(*(one.numpy() for one in tensor_note.read())))
        return
    graph = tf.compat.v1.get_default_graph()
    notes = getattr(graph, _NOTES, [])
    if not is_gradient or sum(note.is_gradient and note.axis is axis for note in notes) < _GRADIENTS:
        setattr(graph, _NOTES, [*notes, tensor_note])


def take_graph_notes(axes: Sequence[ParallelAxis]) -> Iterator[TensorNote]:
    """Yield the tensors recorded for these axes in the current graph and its outer graphs, once."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        notes = getattr(graph, _NOTES, [])
        setattr(graph, _NOTES, [note for note in notes if note.axis not in axes])
        yield from (note for note in notes if note.axis in axes)
        graph = getattr(graph, "outer_graph", None)
