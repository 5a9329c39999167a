"""Calls: with what a model of Keras is called, tensors apart from flags and whatever else a model goes by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.tensor_parallel.checks.kinds import Holding, Same, kind_of
from commlib_tensorflow.tensor._call_context import current_call


@dataclass(frozen=True)
class Call:
    """With what a model is called, or specs of that. Whether it is trained is said apart.

    masks: those that Keras has put on tensors, by the places of these.
    """

    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> Call:
        """Return a call with one value, as that of an example or a batch is; a call is what it is."""
        return given if isinstance(given, Call) else cls((keras.tree.map_structure(_number_as_tensor, given),))

    @classmethod
    def within(cls, model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Call:
        """Return a model's call, as its `call` hears of it."""
        parameters = inspect.signature(model.call).parameters
        names = [name for name, one in parameters.items() if one.kind in _PLACED]
        takes_more = any(one.kind == inspect.Parameter.VAR_POSITIONAL for one in parameters.values())
        at = names.index("training") if "training" in names else len(args)
        more = {} if takes_more else dict(zip(names[at + 1 :], args[at + 1 :], strict=False))
        given = args if takes_more else args[:at]
        left = {name: one for name, one in {**more, **options}.items() if name != "training"}
        tensors = cls(given, left).given
        masks = {place: mask for place, one in enumerate(tensors) if (mask := mask_of(one)) is not None}
        return cls(given, left, masks)

    def mapped(self, function: Callable[[Any], Any]) -> Call:
        """Return the call with other tensors, each made by a function of its own."""
        return self.with_tensors(tuple(map(function, self.tensors)))

    @property
    def given(self) -> list[Any]:
        """Its tensors, arrays and specs of some, in order."""
        return [one for one in keras.tree.flatten((self.args, dict(self.options))) if is_tensor(one)]

    @property
    def tensors(self) -> list[Any]:
        """Those that are given, and the masks of some behind them."""
        return [*self.given, *self.masks.values()]

    def with_tensors(self, tensors: tuple[Any, ...]) -> Call:
        """Return the call with these tensors in the places of its own."""
        count = len(tensors) - len(self.masks)
        masks = dict(zip(self.masks, tensors[count:], strict=True))
        for place, mask in masks.items():
            tensors[place]._keras_mask = mask
        left = iter(tensors[:count])
        args, options = keras.tree.map_structure(
            lambda one: next(left) if is_tensor(one) else one, (self.args, dict(self.options))
        )
        return Call(args, options, masks)


_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that take an argument by its place."""


def mask_of(one: Any) -> Any:
    """Return the mask that Keras has put on a tensor; None if it has none."""
    return getattr(one, "_keras_mask", None)


def is_tensor(one: Any) -> bool:
    """Return whether a value is a tensor, an array, or a spec of one."""
    return hasattr(one, "shape") and hasattr(one, "dtype")


def _number_as_tensor(one: Any) -> Any:
    return tf.convert_to_tensor(one) if isinstance(one, int | float) else one


def is_trained(options: Mapping[str, Any]) -> bool:
    """Return whether a model is trained that is being called so, as Keras tells it or its layers."""
    given, call = options.get("training"), current_call()
    return bool(call.get_value("training") if given is None and call is not None else given)


def kind_of_call(
    training: bool, args: tuple[Any, ...], options: Mapping[str, Any], *, autocast: bool = True
) -> Hashable:
    """Return what tells a call from those of other kinds: see `kind_of`; of tensors their dtypes, ranks and masks.

    autocast: Keras casts floats to those of the model, so that all are one kind.
    """
    told = _kind_of_cast if autocast else _kind_of_other
    given = [(name, kind_of(one, told)) for name, one in options.items() if name != "training"]
    return training, kind_of(args, told), frozenset(given)


def _kind_of_cast(one: Any) -> Any:
    found = _kind_of_other(one)
    return (found[0], "a float", *found[2:]) if type(found) is tuple and found[1] in _FLOATS else found


def _kind_of_other(one: Any) -> Any:
    """Return what is told of a tensor, of a function that is traced, and which layer or dtype something is."""
    kind: Any = type(one)
    if tf.is_tensor(one) or issubclass(kind, _TENSORS):
        mark = kind if issubclass(kind, _OF_THEIR_OWN) else tf.Tensor
        rank = one.shape.rank if tf.is_tensor(one) else len(one.shape)
        return mark, tf.as_dtype(one.dtype), rank, mask_of(one) is not None
    if issubclass(kind, _TRACED):
        return Holding(kind, (one.python_function,))
    if issubclass(kind, keras.Layer | tf.Module):
        return Same(one)
    return one if kind is tf.DType else None


_FLOATS = frozenset((tf.float64, tf.float32, tf.float16, tf.bfloat16))
_TENSORS = keras.KerasTensor, keras.Variable, tf.TensorSpec, np.generic
_OF_THEIR_OWN = tf.Variable, keras.Variable, tf.__internal__.CompositeTensor
"""Tensors by whose class a model may go."""
_TRACED: Any = type(tf.function(lambda: None))
