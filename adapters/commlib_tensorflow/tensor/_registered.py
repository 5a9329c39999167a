"""Registered: the gradient functions that TensorFlow keeps for the operations of a graph, and what they hold of it.

It keeps them for ever, by the names that the operations have for them, and with them the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

from tensorflow.python.framework import ops

_NAME = "_gradient_op_type"
"""The attribute by which an operation names a gradient that somebody has written."""


def kept_by_gradients(operations: Iterable[Any]) -> list[Any]:
    """Return the cells, tuples and lists by which the gradient functions of operations hold what they do."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [function for _, function in _registered(operations)]
    known = set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, FunctionType):
            cells = value.__closure__ or ()
            waiting += cells
            if value.__module__.startswith("tensorflow."):  # lists of its own; those of others may be kept elsewhere
                waiting += [one for cell in cells for one in gc.get_referents(cell) if isinstance(one, list)]
        else:
            found[id(value)] = value
            waiting += [one for one in gc.get_referents(value) if isinstance(one, FunctionType | CellType | tuple)]
    return list(found.values())


def forget_gradients(operations: Iterable[Any]) -> None:
    """Let go of the gradient functions of operations whose graph is not used any more."""
    for name, _ in list(_registered(operations)):
        ops.gradient_registry._registry.pop(name, None)


def _registered(operations: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and the functions of gradients that are one operation's own."""
    for op in operations:
        if op.type != "IdentityN" or _NAME not in op.node_def.attr:
            continue
        name = op.get_attr(_NAME).decode()
        if name.startswith("CustomGradient-") and name in ops.gradient_registry.list():
            yield name, ops.gradient_registry.lookup(name)
