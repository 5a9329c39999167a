"""Sharded arguments: find the arguments of a model that must be shards already, from a layer's input. [pure]"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import mul

from commlib.tensor_parallel.equations import Shape
from commlib.tensor_parallel.trace import ModelTrace, TraceStep


def entries(trace: ModelTrace, value: int, dim: int) -> dict[int, int]:
    """Return the arguments of a model that a value is made of, with the dimension that has become its `dim`.

    If it cannot be followed, the same dimension is assumed for arguments with the same length in it.
    """
    arguments: dict[int, int] = {}
    waiting, seen = [(value, dim)], {(value, dim)}
    while waiting:
        output, at = waiting.pop()
        step = trace.maker(output)
        if step.kind == "given":
            arguments.setdefault(output, at)
            continue
        for one in _inputs_of(trace, step, output, at):
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return arguments or {one: dim for one in _arguments(trace, value) if _has_same_length(trace, one, value, dim)}


def _arguments(trace: ModelTrace, value: int) -> list[int]:
    """Return the arguments of a model that a value is made of."""
    waiting, seen = [value], {value}
    while waiting:
        unvisited = set(trace.maker(waiting.pop()).inputs) - seen
        waiting += unvisited
        seen |= unvisited
    return sorted(one for one in seen if trace.maker(one).kind == "given")


def _has_same_length(trace: ModelTrace, argument: int, value: int, dim: int) -> bool:
    source, target = trace.shapes.get(argument, ()), trace.shapes.get(value, ())
    # Indices that are looked up have fewer dimensions.
    return dim < len(source) <= len(target) and source[dim] == target[dim]


def _inputs_of(trace: ModelTrace, step: TraceStep, output: int, dim: int) -> Iterator[tuple[int, int]]:
    """Yield a step's inputs, each with the dimension that has become `dim` of its result."""
    new = trace.shapes.get(output, ())
    if step.equation is not None and output == step.outputs[0]:
        labels = step.equation.output
        for value, dims in zip(step.inputs, step.equation.inputs, strict=True):
            if dim < len(labels) and labels[dim] in dims:
                yield value, dims.index(labels[dim])
        return
    for value in step.inputs:
        old = trace.shapes.get(value, ())
        if step.kind == "reshape":
            at = _dim_before_reshape(old, new, dim)
        elif step.kind == "join" and len(old) < len(new):
            at = -1 if dim == step.dim % len(new) else dim - (dim > step.dim % len(new))
        elif step.kind == "split" and len(old) > len(new):
            at = dim + (dim >= step.dim % len(old))
        elif step.kind in ("split", "piece", "join", "slice"):
            at = dim
        else:
            at = dim if len(old) == len(new) and old[dim] == new[dim] else -1
        if at >= 0:
            yield value, at


def _dim_before_reshape(old: Shape, new: Shape, dim: int) -> int:
    """Return the dimension that had the elements of a dimension before a reshape; -1 if unknown."""
    before = list(accumulate(new[:dim], mul, initial=1))[dim]
    counts = list(accumulate(old[:-1], mul, initial=1))
    places = [at for at, count in enumerate(counts[: len(old)]) if count == before and old[at] >= new[dim]]
    longer = [at for at in places if old[at] > 1]
    return next(iter(longer or places), -1)
