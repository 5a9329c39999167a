"""Numbers: integers that Keras layers store, such as numbers of heads, that `PerRank` divides among ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import cache
from typing import Any

import keras

from commlib.tensor_parallel.run.rank_numbers import ModuleNumber, change_numbers, numbers_of, whole_numbers_of
from commlib.tensor_parallel.styles import Style
from commlib_tensorflow.tensor._leaves import is_leaf

_OF_WHOLE = ("get_config", "compute_output_shape")
"""Methods that describe a layer as it is in one process, independent of the rank."""


def numbers_in(model: Any, layers: Mapping[str, Any]) -> dict[str, ModuleNumber]:
    """Return the integer attributes of layers other than Keras' own, by names such as "block_0/attention.heads".

    Integers in tuples have their index as a name: "reshape.target_shape.1". layers: the model's, by name.
    """
    return {
        f"{path}.{number.own_name}" if path else number.own_name: number
        for path, layer in {"": model, **layers}.items()
        if not is_leaf(layer)
        for number in _integers_of(layer)
    }


def styles_of_numbers(model: Any, layers: Mapping[str, Any]) -> dict[str, Style]:
    """Return the styles of the numbers that are already divided."""
    named = {"": model, **layers}.items()
    return {
        f"{path}.{name}" if path else name: style for path, layer in named for name, style in numbers_of(layer).items()
    }


def keep_whole_in_configurations(layer: Any) -> None:
    """Make a layer with per-rank numbers report the unsharded ones in its configuration and shape inference."""
    if not getattr(type(layer), "has_own_numbers", False):
        kind: Any = type(layer)
        layer.__class__ = _number_class(kind)


@cache
def _number_class(plain: Any) -> type:
    namespace: dict[str, Any] = {name: _wrap_unsharded(getattr(plain, name)) for name in _OF_WHOLE}
    same = {"__doc__": plain.__doc__, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    known = property(lambda self: plain)  # for code that reads or writes files
    return type(plain.__name__, (plain,), {**namespace, **same, "has_own_numbers": True, "__class__": known})


def _wrap_unsharded(method: Any) -> Any:
    @functools.wraps(method)  # keeps Keras' attributes of the method
    def of_whole(self: Any, *args: Any, **options: Any) -> Any:
        with change_numbers(list(whole_numbers_of(self).items())):
            return method(self, *args, **options)

    return of_whole


def _integers_of(layer: Any) -> list[ModuleNumber]:
    is_keras = type(layer).__module__.startswith("keras.")
    if is_keras and not isinstance(layer, keras.layers.Reshape):
        return []
    numbers = []
    for name, value in vars(layer).items():
        if type(value) is int and not name.startswith("_"):
            numbers.append(ModuleNumber(layer, name))
        elif type(value) is tuple and not name.startswith("_"):
            numbers += [ModuleNumber(layer, name, at) for at, one in enumerate(value) if type(one) is int]
    return numbers
