"""Gradient registry: the gradient functions that TensorFlow keeps for graph operations, and the tensors they hold.

TensorFlow keeps them forever, by the name that the operations use, and with them the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

from tensorflow.python.framework import ops

_NAME = "_gradient_op_type"
"""The attribute that names an operation's custom gradient."""


def tensors_of_gradients(operations: Iterable[Any]) -> list[Any]:
    """Return the cells, tuples and lists through which the gradient functions of operations hold objects."""
    tensors: dict[int, Any] = {}
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
            if value.__module__.startswith("tensorflow."):  # lists of TensorFlow's own; others may have other owners
                waiting += [one for cell in cells for one in gc.get_referents(cell) if isinstance(one, list)]
        else:
            tensors[id(value)] = value
            waiting += [one for one in gc.get_referents(value) if isinstance(one, FunctionType | CellType | tuple)]
    return list(tensors.values())


def forget_gradients(operations: Iterable[Any]) -> None:
    """Drop the gradient functions of operations whose graph is no longer used."""
    for name, _ in list(_registered(operations)):
        ops.gradient_registry._registry.pop(name, None)


def _registered(operations: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and functions of gradients that belong to a single operation."""
    for op in operations:
        if op.type != "IdentityN" or _NAME not in op.node_def.attr:
            continue
        name = op.get_attr(_NAME).decode()
        if name.startswith("CustomGradient-") and name in ops.gradient_registry.list():
            yield name, ops.gradient_registry.lookup(name)
