"""Forward: run a Keras model unsharded, or as one rank with its shards, and keep the values of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import CommlibError, UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.guided_run import GuidedRun, is_guided
from commlib.tensor_parallel.checks.trace_run import TracedRun
from commlib.tensor_parallel.checks.weight_shapes import list_weight_shapes
from commlib.tensor_parallel.run.rank_numbers import ModuleNumber, change_numbers, numbers_of_rank, whole_numbers_of
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary
from commlib_tensorflow._trial_run import preserve_model
from commlib_tensorflow.tensor._calls import ModelCall
from commlib_tensorflow.tensor._guided_calls import GuidedCall
from commlib_tensorflow.tensor._numbers import numbers_in
from commlib_tensorflow.tensor._placeholders import substitute_weights, zeros_in
from commlib_tensorflow.tensor._weights import sharded_weights
from commlib_tensorflow.tensor.attention import ColumnAttention
from commlib_tensorflow.tensor.blocks import ParallelAttention, ParallelMLP
from commlib_tensorflow.tensor.embedding import VocabularyEmbedding
from commlib_tensorflow.tensor.moves import gather, scatter
from commlib_tensorflow.tensor.reversible import VocabularyReversibleEmbedding
from commlib_tensorflow.tensor.tracing import Layers, TraceRecorder, concrete, graph_of


def forward(
    model: Any,
    layers: Layers,
    axis: ParallelAxis,
    given: Any,
    styles: Mapping[str, Style],
    guide: GuidedRun | None,
    *,
    training: bool = False,
    replaces_zeros: bool,
) -> TracedRun:
    """Run a model without gradients, in evaluation or training mode, as `ModelRunner` of `numeric_checks` defines.

    given: the arguments of the call, or `tf.TensorSpec`s of them, which get random values, the same on all ranks.
    replaces_zeros: replace weights that are all zeros by other values.
    """
    call, zeros = ModelCall.of(given), zeros_in(model) if replaces_zeros else frozenset[str]()
    whole = guide is None or guide.cuts
    numbers = _numbers(model, layers, axis, styles, guide)
    recorder = TraceRecorder(
        model, layers, styles, whole=whole or None, guided=None if guide is None else GuidedCall(guide),
        detaches=True, weights=list_weight_shapes(sharded_weights(layers, styles, axis.size), axis, guide),
    )  # fmt: skip
    error: Exception | None = None
    arrays: Mapping[str, Any] = {}
    arriving: Mapping[str, Any] | None = None

    def once(call: ModelCall) -> Any:
        recorder.run(call, training=training)
        if recorder.error is not None:
            raise recorder.error
        guided = {value for step in recorder.trace().steps if is_guided(step) for value in step.inputs}
        values = {
            str(number): tensor
            for number, tensor in enumerate(recorder.tensors)
            if tensor.dtype not in (tf.resource, tf.variant, tf.string)
            and (number in guided or getattr(tensor, "op", None) is None or tensor.op.type != "ReadVariableOp")
        }
        return values, _arriving_gradients(recorder)

    with (
        tf.init_scope(),
        preserve_model(model, call.args, call.options),
        _use_styles(_unsharded_styles(layers) if whole else []),
        change_numbers(numbers),
        substitute_weights(model, zeros),
    ):
        numbered = numbers_of(call)
        try:
            arrays, arriving = graph_of(once, numbered)(*numbered.tensors)
        except Exception as raised:
            if isinstance(raised, CommlibError) and not isinstance(raised, UsageError):
                raise
            error = raised
    values = [_array(arrays.get(str(number))) for number in range(len(recorder.tensors))]
    return TracedRun(
        recorder.trace(), values, {}, {}, {}, draws=training and error is None and recorder.draws,
        communicates=recorder.communicates, hides=bool(recorder.hidden), error=error,
        is_custom=recorder.is_custom,
        arriving=None if arriving is None else {int(number): _array(one) for number, one in arriving.items()},
        zeros=zeros,
    )  # fmt: skip


def _arriving_gradients(recorder: TraceRecorder) -> dict[str, Any] | None:
    """Return the gradients that arrive at layers' results, if custom functions compute them."""
    try:
        return {str(number): one for number, one in recorder.arriving().items()} if recorder.is_custom else None
    except Exception:  # failures are reported as a warning elsewhere
        return None


def can_run_whole(layers: Layers, axis: ParallelAxis) -> bool:
    """Return whether a sharded model can still run unsharded."""
    own = [getattr(layer, "divided_axis", None) or getattr(layer, "axis", None) for layer in layers.values()]
    blocks = any(isinstance(layer, ParallelAttention | ParallelMLP) for layer in layers.values())
    return not blocks and all(one.comm is axis.comm for one in own if isinstance(one, ParallelAxis))


def numbers_of(call: ModelCall, seed: int = 0) -> ModelCall:
    """Return a call with values in its tensors: specs get random values, the same for the same seed.

    Integers are 0 and 1, which are words of any vocabulary, and booleans are true.
    """
    random = np.random.default_rng(seed)

    def to_value(one: Any) -> Any:
        if tf.is_tensor(one) and not isinstance(one, tf.__internal__.EagerTensor):
            one = tf.TensorSpec(one.shape, one.dtype)
        if not isinstance(one, tf.TensorSpec):
            return tf.convert_to_tensor(one)
        shape = concrete(one.shape)
        if one.dtype.is_bool:
            return tf.ones(shape, one.dtype)
        numbers = random.normal(size=shape) if not one.dtype.is_integer else random.integers(0, 2, shape)
        return tf.cast(tf.constant(numbers), one.dtype)

    return call.mapped(to_value)


def _numbers(
    model: Any, layers: Layers, axis: ParallelAxis, styles: Mapping[str, Style], guide: GuidedRun | None
) -> list[tuple[ModuleNumber, int]]:
    """Return the layers' integers to change for a full run, or for a run as this rank."""
    if guide is None:
        return [pair for layer in (model, *layers.values()) for pair in whole_numbers_of(layer).items()]
    return numbers_of_rank(numbers_in(model, layers), styles, axis) if guide.cuts else []


def _unsharded_styles(layers: Layers) -> list[tuple[Any, Style]]:
    """Return the styles with which layers of a sharded model compute the full result, the same on all ranks.

    Activations are gathered after each layer and split before each layer; each rank uses its own weights.
    """
    attention = [layer for layer in layers.values() if isinstance(layer, ColumnAttention)]
    within = {id(one) for layer in attention for one in layer._flatten_layers(include_self=False)}  # type: ignore[attr-defined]
    styles: dict[int, tuple[Any, Style]] = {}
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
        styles[id(layer)] = layer, change
    return list(styles.values())


@contextmanager
def _use_styles(changes: list[tuple[Any, Style]]) -> Iterator[None]:
    """Replace the styles of layers within the context."""
    own = [(layer, layer.style) for layer, _ in changes]
    try:
        for layer, style in changes:
            vars(layer)["style"] = style
        yield
    finally:
        for layer, style in own:
            vars(layer)["style"] = style


def _array(tensor: Any) -> Array:
    array: Array = np.empty(0) if tensor is None else tensor.numpy()
    return array


def split_calls(
    axis: ParallelAxis, call: ModelCall, dims: Mapping[int, int], *, is_part: bool
) -> tuple[ModelCall, ModelCall]:
    """Return the full call and this rank's, as `commlib.tensor_parallel.checks.numeric_checks.ModelRunner` defines.

    call: with shards of sequences if `is_part`, else the full one. Collective.
    """
    with tf.init_scope():
        given = list(numbers_of(call).tensors)
        if is_part:  # a spec without values gets different ones on each rank
            own = numbers_of(call, seed=axis.rank).tensors
            given = [own[at] if at in dims else one for at, one in enumerate(given)]
        move = gather if is_part else scatter
        changed = [move(one, axis, dims[at]) if at in dims else one for at, one in enumerate(given)]
    before, after = call.with_tensors(tuple(given)), call.with_tensors(tuple(changed))
    return (after, before) if is_part else (before, after)
