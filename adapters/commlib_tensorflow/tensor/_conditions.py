"""Conditions: the tensors that decide the branches and loops of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from commlib.tensor_parallel.recording import replace_attribute

BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))

_NUMBERS = ("__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__", "numpy")
"""Methods that request the elements of a tensor outside of a graph."""


def deciding_tensors(op: Any) -> list[Any]:
    """Return the tensors that choose a branch or end a loop; [] for other operations."""
    if op.type in BRANCHES:
        return [op.inputs[0]]
    if op.type not in LOOPS:
        return []
    library = {one.signature.name: one for one in op.graph.as_graph_def().library.function}
    condition, body = (library[op.get_attr(name).name] for name in ("cond", "body"))
    arguments = _needed_arguments(condition, 0)
    while more := {need for at in arguments for need in _needed_arguments(body, at)} - arguments:
        arguments |= more
    return [op.inputs[at] for at in sorted(arguments)]


def _needed_arguments(function: Any, result: int) -> set[int]:
    """Return the indices of the arguments on which a result of a function depends."""
    nodes = {node.name: node for node in function.node_def}
    places = {arg.name: at for at, arg in enumerate(function.signature.input_arg)}
    waiting, seen, needed = [function.ret[function.signature.output_arg[result].name]], set[str](), set[int]()
    while waiting:
        name = waiting.pop().removeprefix("^").partition(":")[0]
        if name in places:
            needed.add(places[name])
        elif name in nodes and name not in seen:
            seen.add(name)
            waiting += nodes[name].input
    return needed


@contextmanager
def watch_element_reads(graph: Any, note: Any) -> Iterator[None]:
    """Call `note` for each graph tensor whose elements are requested within the context: it has none."""
    with graph.as_default():
        kind: Any = type(tf.constant(0))
    with ExitStack() as stack:
        for name in _NUMBERS:
            stack.enter_context(replace_attribute(kind, name, _wrap_read(getattr(kind, name, None), name, note)))
        yield


def _wrap_read(plain: Any, name: str, note: Any) -> Any:
    def wrapped(tensor: Any, *args: Any, **options: Any) -> Any:
        if plain is not None:
            try:
                return plain(tensor, *args, **options)
            except (TypeError, NotImplementedError):
                note(tensor)
                raise
        note(tensor)
        raise TypeError(f"{name} needs the elements of a graph tensor, which has none before the graph runs")

    return wrapped
