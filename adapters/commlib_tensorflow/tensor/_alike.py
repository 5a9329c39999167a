"""Noting what ranks must have alike around divided layers of Keras: see `commlib.tensor_parallel.checks.alike`.

Eagerly values are noted; in a graph, tensors are, and nothing is computed of them but in steps that compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from commlib.comparison.whole_weights import MOST
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.alike import Note, Watch, noted, whole_shape
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._graph import records

_NOTES = "_commlib_alike"
_GRADIENTS = 4
"""Of a graph: those of the last outputs come first, and each is kept until the optimizer's step."""


class Noted(NamedTuple):
    """A tensor of a graph that ranks must have alike. sequence: along which dimension it is a part, if it is one."""

    axis: Axis
    what: str
    layer: str
    tensor: Any
    sequence: int | None
    is_gradient: bool

    def read(self) -> list[Any]:
        """Return tensors of which `note` makes a note on the host."""
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

    def note(self, sample: Array, tells: Any = True) -> Note:
        """Return a note of what was read."""
        return noted(
            self.what,
            self.layer,
            whole_shape(self.tensor.shape, self.sequence),
            str(self.tensor.dtype.name),
            np.asarray(sample),
            is_gradient=self.is_gradient,
            is_part=self.sequence is not None,
            tells=bool(tells),
        )


def given(axis: Axis, layer: Any, x: Any, what: str = "the input", sequence: int | None = None) -> None:
    """Note what a divided layer takes: whole, or this rank's part along `sequence`."""
    if axis.watch is not None and x is not None:
        _take(axis, what if sequence is None else f"its part of a sequence, {what}", layer, x, sequence)


def returned(axis: Axis, layer: Any, gradient: Any) -> None:
    """Note the gradient that comes back to what a divided layer has returned whole."""
    if axis.watch is not None and layer is not None:
        _take(axis, "the gradient of the output", layer, gradient, None, is_gradient=True)


def _take(axis: Axis, what: str, layer: Any, x: Any, sequence: int | None, *, is_gradient: bool = False) -> None:
    watch: Watch = axis.watch
    if watch.is_hidden or not tf.is_tensor(x):
        return
    found = Noted(axis, what, layer.path, x, sequence, is_gradient)
    if tf.executing_eagerly():
        if watch.takes and (is_gradient or records()):
            watch.notes.append(found.note(*(one.numpy() for one in found.read())))
        return
    graph = tf.compat.v1.get_default_graph()
    notes = getattr(graph, _NOTES, [])
    if not is_gradient or sum(note.is_gradient and note.axis is axis for note in notes) < _GRADIENTS:
        setattr(graph, _NOTES, [*notes, found])


def noted_in_graph(axes: Sequence[Axis]) -> Iterator[Noted]:
    """Yield what was noted of these axes in the graph that is being made, and in those around it, once."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        notes = getattr(graph, _NOTES, [])
        setattr(graph, _NOTES, [note for note in notes if note.axis not in axes])
        yield from (note for note in notes if note.axis in axes)
        graph = getattr(graph, "outer_graph", None)
