"""Numbers: integers that layers of Keras keep, such as heads, of which each rank has its part by `PerRank`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import cache
from typing import Any

import keras

from commlib.tensor_parallel.run.per_rank import Number, changed_numbers, numbers_of, whole_numbers_of
from commlib.tensor_parallel.styles import Style
from commlib_tensorflow.tensor._leaves import is_leaf

_OF_WHOLE = ("get_config", "compute_output_shape")
"""What tells of a layer as it is in one process, whatever a rank has."""


def numbers_in(model: Any, layers: Mapping[str, Any]) -> dict[str, Number]:
    """Return the integers of layers that are no single ones, by names such as "block_0/attention.heads".

    Those in tuples have their places for names: "reshape.target_shape.1". layers: those of the model, by their names.
    """
    return {
        f"{path}.{number.own_name}" if path else number.own_name: number
        for path, layer in {"": model, **layers}.items()
        if not is_leaf(layer)
        for number in _own(layer)
    }


def styles_of_numbers(model: Any, layers: Mapping[str, Any]) -> dict[str, Style]:
    """Return the styles of the numbers that are divided already."""
    named = {"": model, **layers}.items()
    return {
        f"{path}.{name}" if path else name: style for path, layer in named for name, style in numbers_of(layer).items()
    }


def keep_whole_in_configurations(layer: Any) -> None:
    """Let a layer whose numbers are a rank's say those of the whole where it is made anew, and where Keras infers."""
    if not getattr(type(layer), "has_own_numbers", False):
        kind: Any = type(layer)
        layer.__class__ = _with_own_numbers(kind)


@cache
def _with_own_numbers(plain: Any) -> type:
    namespace: dict[str, Any] = {name: _of_whole(getattr(plain, name)) for name in _OF_WHOLE}
    same = {"__doc__": plain.__doc__, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    known = property(lambda self: plain)  # to who writes or reads files
    return type(plain.__name__, (plain,), {**namespace, **same, "has_own_numbers": True, "__class__": known})


def _of_whole(method: Any) -> Any:
    @functools.wraps(method)  # what Keras notes of a method that is its own goes along
    def of_whole(self: Any, *args: Any, **options: Any) -> Any:
        with changed_numbers(list(whole_numbers_of(self).items())):
            return method(self, *args, **options)

    return of_whole


def _own(layer: Any) -> list[Number]:
    is_keras = type(layer).__module__.startswith("keras.")
    if is_keras and not isinstance(layer, keras.layers.Reshape):
        return []
    found = []
    for name, value in vars(layer).items():
        if type(value) is int and not name.startswith("_"):
            found.append(Number(layer, name))
        elif type(value) is tuple and not name.startswith("_"):
            found += [Number(layer, name, at) for at, one in enumerate(value) if type(one) is int]
    return found
