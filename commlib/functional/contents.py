"""Contents: what Python's own containers hold, past what a user's subclass of them does when it is asked. [pure]

A table that makes objects when one of them is asked for would make them, and more.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, ItemsView
from typing import Any


def items_of(value: dict[Any, Any]) -> ItemsView[Any, Any]:
    """Return the items of a dict, in its order."""
    return own_method(value, "items")()  # type: ignore[no-any-return]


def elements_of(value: list[Any] | tuple[Any, ...] | deque[Any] | set[Any] | frozenset[Any]) -> list[Any]:
    """Return the elements of one of Python's own containers, or of a subclass of it."""
    return list(own_method(value, "__iter__")())


def own_method(value: Any, name: str) -> Callable[..., Any]:
    """Return a method of a container that reads or writes it and does no more; of what only looks like one its own."""
    kind = next((one for one in _KINDS if issubclass(type(value), one)), None)
    return getattr(value, name) if kind is None else functools.partial(getattr(kind, name), value)


_KINDS = (OrderedDict, dict, list, tuple, deque, set, frozenset)
