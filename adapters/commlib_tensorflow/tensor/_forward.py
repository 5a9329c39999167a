"""Forward: run a model of Keras as a whole, or as one rank with its part, and keep the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import CommlibError, UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.guide import Guide, is_guided
from commlib.tensor_parallel.checks.runs import Run
from commlib.tensor_parallel.checks.seen_weights import seen_weights
from commlib.tensor_parallel.run.per_rank import Number, changed_numbers, numbers_of_rank, whole_numbers_of
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary
from commlib_tensorflow._unnoticed import unnoticed
from commlib_tensorflow.tensor._calls import Call
from commlib_tensorflow.tensor._guided import Guided
from commlib_tensorflow.tensor._numbers import numbers_in
from commlib_tensorflow.tensor._stand_ins import standing_in, zeros_in
from commlib_tensorflow.tensor._weights import divided_weights
from commlib_tensorflow.tensor.attention import ColumnAttention
from commlib_tensorflow.tensor.blocks import ParallelAttention, ParallelMLP
from commlib_tensorflow.tensor.embedding import VocabularyEmbedding
from commlib_tensorflow.tensor.reversible import VocabularyReversibleEmbedding
from commlib_tensorflow.tensor.tracing import Layers, Recorder, concrete, graph_of


def forward(
    model: Any,
    layers: Layers,
    axis: Axis,
    given: Any,
    styles: Mapping[str, Style],
    guide: Guide | None,
    *,
    training: bool = False,
    stands_in: bool,
) -> Run:
    """Run a model without gradients, in evaluation or training mode: see `commlib.tensor_parallel.checks.numbers.Runs`.

    given: with what it is called, or `tf.TensorSpec`s of that: they get numbers here, the same on all ranks. stands_in:
    with other numbers for weights that are zeros.
    """
    call, zeros = Call.of(given), zeros_in(model) if stands_in else frozenset[str]()
    whole = guide is None or guide.cuts
    numbers = _numbers(model, layers, axis, styles, guide)
    recorder = Recorder(
        model, layers, styles, whole=whole or None, guided=None if guide is None else Guided(guide),
        detaches=True, weights=seen_weights(divided_weights(layers, styles, axis.size), axis, guide),
    )  # fmt: skip
    error: Exception | None = None
    found: Mapping[str, Any] = {}
    arriving: Mapping[str, Any] | None = None

    def once(call: Call) -> Any:
        recorder.run(call, training=training)
        if recorder.error is not None:
            raise recorder.error
        taken = {value for step in recorder.trace().steps if is_guided(step) for value in step.inputs}
        values = {
            str(number): tensor
            for number, tensor in enumerate(recorder.tensors)
            if tensor.dtype not in (tf.resource, tf.variant, tf.string)
            and (number in taken or getattr(tensor, "op", None) is None or tensor.op.type != "ReadVariableOp")
        }
        return values, _arriving(recorder)

    with (
        tf.init_scope(),
        unnoticed(model, call.args, call.options),
        _changed(_undivided(layers) if whole else []),
        changed_numbers(numbers),
        standing_in(model, zeros),
    ):
        numbered = numbers_of(call)
        try:
            found, arriving = graph_of(once, numbered)(*numbered.tensors)
        except Exception as raised:
            if isinstance(raised, CommlibError) and not isinstance(raised, UsageError):
                raise
            error = raised
    values = [_array(found.get(str(number))) for number in range(len(recorder.tensors))]
    return Run(
        recorder.trace(), values, {}, {}, {}, draws=training and error is None and recorder.draws,
        communicates=recorder.communicates, hides=bool(recorder.hidden), error=error,
        is_custom=recorder.is_custom,
        arriving=None if arriving is None else {int(number): _array(one) for number, one in arriving.items()},
        zeros=zeros,
    )  # fmt: skip


def _arriving(recorder: Recorder) -> dict[str, Any] | None:
    """Return the gradients that come to layers' results, where functions make them that are no derivatives."""
    try:
        return {str(number): one for number, one in recorder.arriving().items()} if recorder.is_custom else None
    except Exception:  # what is not known to be right is warned of
        return None


def can_run_whole(layers: Layers, axis: Axis) -> bool:
    """Return whether a divided model can compute what it did before."""
    own = [getattr(layer, "divided_axis", None) or getattr(layer, "axis", None) for layer in layers.values()]
    blocks = any(isinstance(layer, ParallelAttention | ParallelMLP) for layer in layers.values())
    return not blocks and all(one.comm is axis.comm for one in own if isinstance(one, Axis))


def numbers_of(call: Call, seed: int = 0) -> Call:
    """Return a call with numbers in its tensors: random ones, the same for the same seed, where none are given.

    Integers are 0 and 1, which are words of any vocabulary, and booleans are true.
    """
    random = np.random.default_rng(seed)

    def made(one: Any) -> Any:
        if tf.is_tensor(one) and not isinstance(one, tf.__internal__.EagerTensor):
            one = tf.TensorSpec(one.shape, one.dtype)
        if not isinstance(one, tf.TensorSpec):
            return tf.convert_to_tensor(one)
        shape = concrete(one.shape)
        if one.dtype.is_bool:
            return tf.ones(shape, one.dtype)
        numbers = random.normal(size=shape) if not one.dtype.is_integer else random.integers(0, 2, shape)
        return tf.cast(tf.constant(numbers), one.dtype)

    return call.mapped(made)


def _numbers(
    model: Any, layers: Layers, axis: Axis, styles: Mapping[str, Style], guide: Guide | None
) -> list[tuple[Number, int]]:
    """Return the numbers of layers that are others than they have, for a run as a whole, or as this rank."""
    if guide is None:
        return [pair for layer in (model, *layers.values()) for pair in whole_numbers_of(layer).items()]
    return numbers_of_rank(numbers_in(model, layers), styles, axis) if guide.cuts else []


def _undivided(layers: Layers) -> list[tuple[Any, Style]]:
    """Return with which styles layers of a divided model compute the whole, on all ranks alike.

    Activations are put together where they leave a layer, and divided again where they enter one: each rank has the
    weights that it has.
    """
    attention = [layer for layer in layers.values() if isinstance(layer, ColumnAttention)]
    within = {id(one) for layer in attention for one in layer._flatten_layers(include_self=False)}  # type: ignore[attr-defined]
    found: dict[int, tuple[Any, Style]] = {}
    for layer in layers.values():
        style = getattr(layer, "style", None)
        if not isinstance(style, Column | Row | Vocabulary):
            continue
        is_table = isinstance(layer, VocabularyEmbedding) and not isinstance(layer, VocabularyReversibleEmbedding)
        if id(layer) in within or is_table or isinstance(layer, ColumnAttention):
            change: Style = replace(style, sequence=None)
        elif isinstance(style, Row):
            change = replace(style, split=True, sequence=None)
        else:
            change = replace(style, gather=True, sequence=None)
        found[id(layer)] = layer, change
    return list(found.values())


@contextmanager
def _changed(changes: list[tuple[Any, Style]]) -> Iterator[None]:
    """Give layers other styles for a while."""
    own = [(layer, layer.style) for layer, _ in changes]
    try:
        for layer, style in changes:
            vars(layer)["style"] = style
        yield
    finally:
        for layer, style in own:
            vars(layer)["style"] = style


def _array(tensor: Any) -> Array:
    found: Array = np.empty(0) if tensor is None else tensor.numpy()
    return found
