"""Guards: numbers, flags and other values that forwards read during a trace, to detect later changes."""

from __future__ import annotations

import builtins
import enum
import reprlib
import weakref
from collections import deque
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib.errors import UsageError

MISSING = type("Missing", (), {"__repr__": lambda self: "missing", "__reduce__": lambda self: "MISSING"})()
"""The value of a missing attribute."""

_PLAIN = frozenset((
    NoneType, bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), type(MISSING),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip
_DEPTH = 8


class Guards:
    """Recorded values by owner, without keeping the model alive.

    readings.note(model, "scale", "scale", 1.0); model.scale = 2.0; readings.check()
    """

    def __init__(self) -> None:
        self._guards: dict[tuple[int, str], _Guard] = {}

    def note(self, owner: Any, name: str, title: str, value: Any, *, is_shown: bool = False) -> None:
        """Record an attribute of an object, or an item of a dictionary of globals.

        is_shown: for a tensor that the graph's operations use directly: its values may change, but not its identity.
        """
        key = id(owner), name
        if key not in self._guards:
            self._guards[key] = _Guard(owner, name, title, value, is_shown)

    def add(self, other: Guards) -> None:
        """Add the values of another trace."""
        self._guards = other._guards | self._guards

    def check(self) -> None:
        """Raise UsageError, with old and new value, if a value has changed since."""
        for one in self._guards.values():
            if change := one.change():
                raise UsageError(f"pipeline: {change}: {_ADVICE}")


_ADVICE = (
    "values that a forward reads are fixed when the model is split. Put the value into a buffer (register_buffer) "
    "that forward computes with; or pass the layers as a list or an nn.Sequential, which are called without a trace; "
    "or make a new pipeline"
)


class _Guard:
    __slots__ = ("_get_owner", "_is_dict", "_is_shown", "_kind", "_name", "_text", "_title", "_value")

    def __init__(self, owner: Any, name: str, title: str, value: Any, is_shown: bool) -> None:
        self._get_owner = _reference(owner)
        self._is_dict, self._name, self._title = isinstance(owner, dict), name, title
        self._kind, self._is_shown = type(value), is_shown
        self._value = _Identity(value, is_shown) if is_shown else freeze(value)
        self._text = _shown(value)

    def change(self) -> str:
        owner = self._get_owner()
        if owner is None:  # it is immutable
            return ""
        now = owner.get(self._name, MISSING) if self._is_dict else getattr(owner, self._name, MISSING)
        value = self._value
        if now is value or (type(value) is _Identity and value.is_still(now)):
            return ""
        state = _Identity(now, self._is_shown) if self._is_shown else freeze(now)
        if type(now) is self._kind and (state == value or (state != state and value != value)):
            return ""
        text = _shown(now)
        other = f"is {text} now" if text != self._text else "is another object now, or has changed"
        return f"{self._title} was {self._text} when the model was split, and {other}"


class _Identity:
    """Represents an object that is equal only to itself, in its current state."""

    __slots__ = ("_get", "_version")

    def __init__(self, value: Any, is_shown: bool = False) -> None:
        self._get = _reference(value)
        is_counted = isinstance(value, Tensor) and not is_shown and not value.is_inference()
        self._version = value._version if is_counted else None

    def is_still(self, value: Any) -> bool:
        return self._get() is value and (self._version is None or self._version == value._version)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return False
        own = self._get()
        return own is not None and own is other._get() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def _reference(value: Any) -> Any:
    """Return a function that returns an object; it holds a weak reference if possible."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def freeze(value: Any, depth: int = _DEPTH) -> Any:
    """Return an immutable snapshot of a value; snapshots are equal if and only if their values are."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return value
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if depth and not is_namespace(value):
        if isinstance(value, list | tuple | deque):
            return kind, tuple((type(one), freeze(one, depth - 1)) for one in value)
        if isinstance(value, dict):
            return kind, tuple((key, type(one), freeze(one, depth - 1)) for key, one in value.items())
        if isinstance(value, set | frozenset):
            return kind, frozenset(value if all(type(one) in _PLAIN for one in value) else map(id, value))
        if isinstance(value, SimpleNamespace):
            return kind, freeze(vars(value), depth - 1)
    return _Identity(value)


def is_namespace(value: Any) -> bool:
    """Return whether a dictionary holds the global names of some code: only the names that a function uses count."""
    return type(value) is dict and ("__builtins__" in value or value is vars(builtins))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        return reprlib.repr(value)
    except Exception:
        return f"a {type(value).__name__}"
