"""Weights of a Keras model that a plan shards, and the shapes that user code sees."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.weight_shapes import SeenWeights, WeightShape
from commlib.tensor_parallel.recording import replace_attribute
from commlib.tensor_parallel.styles import Column, Row, Sequence, Style, Vocabulary
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor.layers import find_layer, shardings_of

_SYMBOLIC = tf.__internal__.SymbolicTensor
"""Tensors of graphs."""

_ASKING = tuple((module, name) for module in (keras.ops, tf) for name in ("shape", "size", "ones_like", "zeros_like"))


def sharded_weights(
    layers: Mapping[str, Any], styles: Collection[str], size: int
) -> Iterator[tuple[str, Any, Sharding]]:
    """Yield (layer, variable, sharding) of weights that are sharded, or will be, if styles are a mapping.

    size: the number of ranks.
    """
    for name in styles:
        layer, style = layers.get(name), styles[name] if isinstance(styles, Mapping) else None
        if layer is None:
            continue
        if hasattr(layer, "become"):
            for variable in layer.variables:
                shard = shard_of(variable)
                if shard is not None and isinstance(shard.sharding, Sharding):
                    yield name, variable, shard.sharding
        elif isinstance(style, Column | Row | Sequence | Vocabulary):
            yield from _planned_weights(name, layer, style, size)


def _planned_weights(name: str, layer: Any, style: Style, size: int) -> Iterator[tuple[str, Any, Sharding]]:
    kind = find_layer(name, layer, style)
    for variable, sharding in shardings_of(kind, name, layer, style, size):
        yield name, variable, sharding


def _handle_of(tensor: Any) -> Any:
    """Return the handle of the variable that a graph tensor reads; None if it reads none."""
    if tensor.op.type != "ReadVariableOp":
        return None
    inner = tensor.op.inputs[0].name
    return next((outer for outer, own in getattr(tensor.graph, "captures", ()) if own.name == inner), None)


@contextmanager
def override_shapes(
    weights: SeenWeights, note: Callable[[WeightShape], bool], packages: tuple[str, ...]
) -> Iterator[None]:
    """Make user code, and no other code, see the shapes in `weights` within the context.

    note: called for each weight whose shape is requested; returns whether it counts. packages: folders of code that is
    not the user's.
    """
    tensors = ((one, one.weight._value) for one in weights.values())
    by_ids = {**weights, **{id(key): one for one, tensor in tensors for key in (tensor, tensor.handle)}}

    def counting(weight: Any, frame: FrameType) -> WeightShape | None:
        """Return the shape to report for a weight, if user code outside of its layer requests it."""
        if frame.f_code.co_filename.startswith(packages):
            return None
        one = by_ids.get(id(_handle_of(weight) if isinstance(weight, _SYMBOLIC) else weight))
        return one if one is not None and note(one) and one.shape is not None else None

    def shape_of(plain: Any) -> Callable[[Any], Any]:
        def shape(weight: Any) -> Any:
            result, one = plain(weight), counting(weight, sys._getframe(1))
            return result if one is None else type(result)(one.shape)

        return shape

    def counted(layer: Any) -> int:
        result, frame = int(count_params(layer)), sys._getframe(1)
        each = ((weight, counting(weight, frame)) for weight in layer.weights)
        more = [prod(one.shape or ()) - prod(weight.shape) for weight, one in each if one is not None]
        return result + sum(map(int, more))

    def arrays(layer: Any) -> list[Any]:
        frame, known = sys._getframe(1), any(id(weight) in by_ids for weight in layer.weights)
        if not known or frame.f_code.co_filename.startswith(packages):
            return list(get_weights(layer))
        each = [(weight, counting(weight, frame)) for weight in layer.weights]
        return [np.zeros(tuple(weight.shape) if seen is None else seen.shape, weight.dtype) for weight, seen in each]

    def asking(function: Any) -> Any:
        @functools.wraps(function)
        def called(value: Any, *args: Any, **options: Any) -> Any:
            one = counting(value, sys._getframe(1))
            return function(value if one is None else tf.zeros(one.shape, one.weight.dtype), *args, **options)

        return called

    count_params, get_weights = keras.layers.Layer.count_params, keras.layers.Layer.get_weights
    with ExitStack() as stack:
        kinds = {type(one) for seen in weights.values() for one in (seen.weight, seen.weight._value)}
        for kind in {*kinds, _SYMBOLIC} if weights else ():
            stack.enter_context(replace_attribute(kind, "shape", property(shape_of(kind.shape.fget))))
            if hasattr(kind, "get_shape"):
                stack.enter_context(replace_attribute(kind, "get_shape", shape_of(kind.get_shape)))
        for owner, name in _ASKING if weights else ():
            stack.enter_context(replace_attribute(owner, name, asking(getattr(owner, name))))
        if weights:
            stack.enter_context(replace_attribute(keras.layers.Layer, "count_params", counted))
            stack.enter_context(replace_attribute(keras.layers.Layer, "get_weights", arrays))
        yield
