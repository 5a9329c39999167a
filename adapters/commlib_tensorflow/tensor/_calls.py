"""Model calls: the arguments of a Keras model's call, with tensors separated from flags and other values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.tensor_parallel.checks.kinds import ObjectContents, SameObject, kind_of
from commlib_tensorflow.tensor._call_context import current_call


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a model's call, or specs of them. The training flag is separate.

    masks: Keras' masks of tensors, by the index of the tensor.
    """

    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> ModelCall:
        """Return a call with one value, such as an example or a batch; a call is returned unchanged."""
        return given if isinstance(given, ModelCall) else cls((keras.tree.map_structure(_number_as_tensor, given),))

    @classmethod
    def within(cls, model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> ModelCall:
        """Return a model's call from the arguments of its `call` method."""
        parameters = inspect.signature(model.call).parameters
        names = [name for name, one in parameters.items() if one.kind in _PLACED]
        takes_more = any(one.kind == inspect.Parameter.VAR_POSITIONAL for one in parameters.values())
        at = names.index("training") if "training" in names else len(args)
        more = {} if takes_more else dict(zip(names[at + 1 :], args[at + 1 :], strict=False))
        given = args if takes_more else args[:at]
        left = {name: one for name, one in {**more, **options}.items() if name != "training"}
        tensors = cls(given, left).inputs
        masks = {place: mask for place, one in enumerate(tensors) if (mask := mask_of(one)) is not None}
        return cls(given, left, masks)

    def mapped(self, function: Callable[[Any], Any]) -> ModelCall:
        """Return the call with its tensors replaced by `function` of each."""
        return self.with_tensors(tuple(map(function, self.tensors)))

    @property
    def inputs(self) -> list[Any]:
        """Its tensors, arrays and specs, in order."""
        return [one for one in keras.tree.flatten((self.args, dict(self.options))) if is_tensor(one)]

    @property
    def tensors(self) -> list[Any]:
        """The tensors, followed by their masks."""
        return [*self.inputs, *self.masks.values()]

    def with_tensors(self, tensors: tuple[Any, ...]) -> ModelCall:
        """Return the call with its tensors replaced."""
        count = len(tensors) - len(self.masks)
        masks = dict(zip(self.masks, tensors[count:], strict=True))
        for place, mask in masks.items():
            tensors[place]._keras_mask = mask
        left = iter(tensors[:count])
        args, options = keras.tree.map_structure(
            lambda one: next(left) if is_tensor(one) else one, (self.args, dict(self.options))
        )
        return ModelCall(args, options, masks)


_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that accept a positional argument."""


def mask_of(one: Any) -> Any:
    """Return the mask that Keras has put on a tensor; None if it has none."""
    return getattr(one, "_keras_mask", None)


def is_tensor(one: Any) -> bool:
    """Return whether a value is a tensor, an array, or a spec of one."""
    return hasattr(one, "shape") and hasattr(one, "dtype")


def _number_as_tensor(one: Any) -> Any:
    return tf.convert_to_tensor(one) if isinstance(one, int | float) else one


def is_trained(options: Mapping[str, Any]) -> bool:
    """Return whether the current call of a model trains, by its options or by Keras' context."""
    given, call = options.get("training"), current_call()
    return bool(call.get_value("training") if given is None and call is not None else given)


def kind_of_call(
    training: bool, args: tuple[Any, ...], options: Mapping[str, Any], *, autocast: bool = True
) -> Hashable:
    """Return a key for the kind of a call: see `kind_of`; tensors count by dtype, rank and mask.

    autocast: Keras casts floats to the model's dtype, so all float dtypes are one kind.
    """
    describe = _kind_of_cast if autocast else _kind_of_other
    given = [(name, kind_of(one, describe)) for name, one in options.items() if name != "training"]
    return training, kind_of(args, describe), frozenset(given)


def _kind_of_cast(one: Any) -> Any:
    kind = _kind_of_other(one)
    return (kind[0], "a float", *kind[2:]) if type(kind) is tuple and kind[1] in _FLOATS else kind


def _kind_of_other(one: Any) -> Any:
    """Return the kind of a tensor, of a traced function, or the identity of a layer or dtype."""
    kind: Any = type(one)
    if tf.is_tensor(one) or issubclass(kind, _TENSORS):
        mark = kind if issubclass(kind, _OF_THEIR_OWN) else tf.Tensor
        rank = one.shape.rank if tf.is_tensor(one) else len(one.shape)
        return mark, tf.as_dtype(one.dtype), rank, mask_of(one) is not None
    if issubclass(kind, _TRACED):
        return ObjectContents(kind, (one.python_function,))
    if issubclass(kind, keras.Layer | tf.Module):
        return SameObject(one)
    return one if kind is tf.DType else None


_FLOATS = frozenset((tf.float64, tf.float32, tf.float16, tf.bfloat16))
_TENSORS = keras.KerasTensor, keras.Variable, tf.TensorSpec, np.generic
_OF_THEIR_OWN = tf.Variable, keras.Variable, tf.__internal__.CompositeTensor
"""Classes of tensors by which a model may branch."""
_TRACED: Any = type(tf.function(lambda: None))
