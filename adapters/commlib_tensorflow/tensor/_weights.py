"""Weights: those of a model of Keras that a plan divides, and what its own code sees of their shapes."""

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
from commlib.tensor_parallel.checks.seen_weights import Seen, SeenWeights
from commlib.tensor_parallel.recording import replaced
from commlib.tensor_parallel.styles import Column, Row, Sequence, Style, Vocabulary
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor.layers import find_layer, shardings_of

_SYMBOLIC = tf.__internal__.SymbolicTensor
"""Tensors of graphs."""

_ASKING = tuple((module, name) for module in (keras.ops, tf) for name in ("shape", "size", "ones_like", "zeros_like"))


def divided_weights(
    layers: Mapping[str, Any], styles: Collection[str], size: int
) -> Iterator[tuple[str, Any, Sharding]]:
    """Yield (layer, variable, how it is divided) of what is divided, or will be by styles that are a mapping.

    size: among how many ranks.
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
            yield from _planned(name, layer, style, size)


def _planned(name: str, layer: Any, style: Style, size: int) -> Iterator[tuple[str, Any, Sharding]]:
    kind = find_layer(name, layer, style)
    for variable, sharding in shardings_of(kind, name, layer, style, size):
        yield name, variable, sharding


def _handle_of(tensor: Any) -> Any:
    """Return the handle of the variable that a tensor of a graph is the value of; None if of none."""
    if tensor.op.type != "ReadVariableOp":
        return None
    inner = tensor.op.inputs[0].name
    return next((outer for outer, own in getattr(tensor.graph, "captures", ()) if own.name == inner), None)


@contextmanager
def shapes_seen(weights: SeenWeights, note: Callable[[Seen], bool], packages: tuple[str, ...]) -> Iterator[None]:
    """Let who asks for the shape of a weight see what `weights` say, for a while: the user's code, and no other.

    note: hears of each that is asked for, and returns whether it counts. packages: folders of what is not the user's.
    """
    tensors = ((one, one.weight._value) for one in weights.values())
    by_ids = {**weights, **{id(key): one for one, tensor in tensors for key in (tensor, tensor.handle)}}

    def counting(weight: Any, frame: FrameType) -> Seen | None:
        """Return how a weight is seen, if the user's code asks, in what is not its layer."""
        if frame.f_code.co_filename.startswith(packages):
            return None
        one = by_ids.get(id(_handle_of(weight) if isinstance(weight, _SYMBOLIC) else weight))
        return one if one is not None and note(one) and one.shape is not None else None

    def shape_of(plain: Any) -> Callable[[Any], Any]:
        def shape(weight: Any) -> Any:
            found, one = plain(weight), counting(weight, sys._getframe(1))
            return found if one is None else type(found)(one.shape)

        return shape

    def counted(layer: Any) -> int:
        found, frame = int(count_params(layer)), sys._getframe(1)
        each = ((weight, counting(weight, frame)) for weight in layer.weights)
        more = [prod(one.shape or ()) - prod(weight.shape) for weight, one in each if one is not None]
        return found + sum(map(int, more))

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
            stack.enter_context(replaced(kind, "shape", property(shape_of(kind.shape.fget))))
            if hasattr(kind, "get_shape"):
                stack.enter_context(replaced(kind, "get_shape", shape_of(kind.get_shape)))
        for owner, name in _ASKING if weights else ():
            stack.enter_context(replaced(owner, name, asking(getattr(owner, name))))
        if weights:
            stack.enter_context(replaced(keras.layers.Layer, "count_params", counted))
            stack.enter_context(replaced(keras.layers.Layer, "get_weights", arrays))
        yield
