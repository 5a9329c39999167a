"""Split: decide between which operations of a Keras model its stages are cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib.pipeline.split import even_counts, read_split, unknown_split

_SEVERAL = 4
"""Units per rank, so that stages of even time can be made of them."""


class Nodes:
    """Calls of a graph's operations, in a topological order, and the names of their values."""

    def __init__(self, graph: Any) -> None:
        # Keras has no public way to list the order and arguments of its calls.
        by_depth: Mapping[int, Sequence[Any]] = graph._nodes_by_depth
        ordered = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        self.all: list[Any] = [node for node in ordered if not node.is_input]
        self.names: dict[int, str] = {}
        """The name of each value, by the id of its KerasTensor."""
        self.tensors: dict[str, Any] = {}
        """The KerasTensor of each name."""
        for number, tensor in enumerate(graph.inputs):
            self._name(tensor, f"input {number}")
        for number, node in enumerate(self.all):
            for place, tensor in enumerate(node.outputs):
                self._name(tensor, f"{node.operation.name} {number}.{place}")
        self.inputs = tuple(self.names[id(tensor)] for tensor in graph.inputs)
        self.outputs = tuple(self.names[id(tensor)] for tensor in graph.outputs)

    def _name(self, tensor: Any, name: str) -> None:
        self.names[id(tensor)] = name
        self.tensors[name] = tensor

    def is_masked(self, name: str) -> bool:
        """Return whether a value has a mask."""
        return getattr(self.tensors[name], "_keras_mask", None) is not None

    def inputs_of(self, node: Any) -> Iterator[str]:
        """Yield the names of a call's inputs."""
        return (self.names[id(tensor)] for tensor in node.input_tensors)


def counts_of(nodes: Nodes, stages: int, split: Any) -> tuple[int, ...]:
    """Return the number of operations of each stage."""
    if not isinstance(split, str):
        return read_split(split, [node.operation.name for node in nodes.all], stages)
    if split != "auto":
        raise unknown_split(split)
    return _balanced(nodes, stages)


def _balanced(nodes: Nodes, stages: int) -> tuple[int, ...]:
    """Cut so that weights are even, between operations where as few values as possible cross."""
    units = units_of(nodes, stages)
    ends = [0, *accumulate(units)]
    seen: set[int] = set()
    sizes = [_new_bytes(node.operation, seen) for node in nodes.all]
    return of_units(units, even_counts([sum(sizes[start:end]) for start, end in pairwise(ends)], stages))


def units_of(nodes: Nodes, least: int) -> tuple[int, ...]:
    """Return the number of operations of each unit: as few values as possible cross, but there are `least` units.

    Raises UsageError if there are fewer operations than that.
    """
    count = len(nodes.all)
    crossing = _alive(nodes)
    for most in sorted(set(crossing[1:])):
        places = [0, *(place for place in range(1, count) if crossing[place] <= most), count]
        if len(places) > least:
            return tuple(end - start for start, end in pairwise(places))
    if least > 1 or not count:
        raise UsageError(f"pipeline: {count} layers cannot be cut into {least} stages: each stage needs at least one")
    return (count,)


def units_to_measure(nodes: Nodes, ranks: int) -> tuple[int, ...]:
    """Return the number of operations of each unit, from which stages of even time are made."""
    return units_of(nodes, max(1, min(_SEVERAL * ranks, len(nodes.all))))


def of_units(units: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the number of operations of each stage, given the number of units of each."""
    ends = [0, *accumulate(counts)]
    return tuple(sum(units[start:end]) for start, end in pairwise(ends))


def _alive(nodes: Nodes) -> list[int]:
    """Return, for each operation, the number of values computed before it and used by it or later."""
    count = len(nodes.all)
    producers = dict.fromkeys(nodes.inputs, -1)
    last: dict[str, int] = {}
    for number, node in enumerate(nodes.all):
        last |= dict.fromkeys(nodes.inputs_of(node), number)
        producers |= {nodes.names[id(tensor)]: number for tensor in node.outputs}
    last |= dict.fromkeys(nodes.outputs, count)
    return [sum(producers[name] < place <= end for name, end in last.items()) for place in range(count)]


def _new_bytes(operation: Any, seen: set[int]) -> float:
    """Return the bytes of the weights that an operation is the first one to use."""
    total = 0.0
    for variable in getattr(operation, "trainable_variables", ()):
        if id(variable) not in seen:
            seen.add(id(variable))
            total += nbytes(variable)
    return total


def nbytes(variable: Any) -> int:
    """Return the bytes of a variable."""
    width: int = tf.as_dtype(variable.dtype).size
    elements: int = math.prod(variable.shape)
    return elements * width
