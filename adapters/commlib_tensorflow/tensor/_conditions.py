"""Conditions: the values that decide what a graph goes on with, branches and loops, or how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from commlib.tensor_parallel.recording import replaced

BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))

_NUMBERS = ("__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__", "numpy")
"""What a tensor is asked for its elements by, outside of a graph."""


def decided_by(op: Any) -> list[Any]:
    """Return the tensors by which a branch is chosen, or a loop ended; [] for other operations."""
    if op.type in BRANCHES:
        return [op.inputs[0]]
    if op.type not in LOOPS:
        return []
    library = {one.signature.name: one for one in op.graph.as_graph_def().library.function}
    condition, body = (library[op.get_attr(name).name] for name in ("cond", "body"))
    found = _needed(condition, 0)
    while more := {need for at in found for need in _needed(body, at)} - found:
        found |= more
    return [op.inputs[at] for at in sorted(found)]


def _needed(function: Any, result: int) -> set[int]:
    """Return which arguments a result of a function is made of."""
    nodes = {node.name: node for node in function.node_def}
    places = {arg.name: at for at, arg in enumerate(function.signature.input_arg)}
    waiting, seen, found = [function.ret[function.signature.output_arg[result].name]], set[str](), set[int]()
    while waiting:
        name = waiting.pop().removeprefix("^").partition(":")[0]
        if name in places:
            found.add(places[name])
        elif name in nodes and name not in seen:
            seen.add(name)
            waiting += nodes[name].input
    return found


@contextmanager
def asking(graph: Any, note: Any) -> Iterator[None]:
    """Let `note` hear of each tensor of a graph that is asked for its elements, for a while: it has none."""
    with graph.as_default():
        kind: Any = type(tf.constant(0))
    with ExitStack() as stack:
        for name in _NUMBERS:
            stack.enter_context(replaced(kind, name, _noted(getattr(kind, name, None), name, note)))
        yield


def _noted(plain: Any, name: str, note: Any) -> Any:
    def asked(tensor: Any, *args: Any, **options: Any) -> Any:
        if plain is not None:
            try:
                return plain(tensor, *args, **options)
            except (TypeError, NotImplementedError):
                note(tensor)
                raise
        note(tensor)
        raise TypeError(f"{name} of a tensor in a graph, which has no elements yet")

    return asked
