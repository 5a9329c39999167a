"""Entering: which arguments of a model are parts already, and along which dimension, by what a layer takes. [pure]"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import mul

from commlib.tensor_parallel.equations import Shape
from commlib.tensor_parallel.trace import Step, Trace


def entries(trace: Trace, value: int, dim: int) -> dict[int, int]:
    """Return the arguments of a model that a value is made of, and which of their dimensions has become its `dim`.

    Where that cannot be followed it is taken for the same one of those that are as long there.
    """
    found: dict[int, int] = {}
    waiting, seen = [(value, dim)], {(value, dim)}
    while waiting:
        made, at = waiting.pop()
        step = trace.maker(made)
        if step.kind == "given":
            found.setdefault(made, at)
            continue
        for one in _before(trace, step, made, at):
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return found or {one: dim for one in _arguments(trace, value) if _looks_alike(trace, one, value, dim)}


def _arguments(trace: Trace, value: int) -> list[int]:
    """Return the arguments of a model that a value is made of."""
    waiting, seen = [value], {value}
    while waiting:
        taken = set(trace.maker(waiting.pop()).inputs) - seen
        waiting += taken
        seen |= taken
    return sorted(one for one in seen if trace.maker(one).kind == "given")


def _looks_alike(trace: Trace, argument: int, value: int, dim: int) -> bool:
    given, made = trace.shapes.get(argument, ()), trace.shapes.get(value, ())
    return dim < len(given) <= len(made) and given[dim] == made[dim]  # numbers of rows that are looked up have less


def _before(trace: Trace, step: Step, made: int, dim: int) -> Iterator[tuple[int, int]]:
    """Return what a step has taken, and which dimension of it has become `dim` of what it made."""
    new = trace.shapes.get(made, ())
    if step.equation is not None and made == step.outputs[0]:
        labels = step.equation.output
        for value, dims in zip(step.inputs, step.equation.inputs, strict=True):
            if dim < len(labels) and labels[dim] in dims:
                yield value, dims.index(labels[dim])
        return
    for value in step.inputs:
        old = trace.shapes.get(value, ())
        if step.kind == "reshape":
            at = _reshaped(old, new, dim)
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


def _reshaped(old: Shape, new: Shape, dim: int) -> int:
    """Return which dimension had the elements that a dimension has by now; -1 if nobody can tell."""
    before = list(accumulate(new[:dim], mul, initial=1))[dim]
    counts = list(accumulate(old[:-1], mul, initial=1))
    places = [at for at, count in enumerate(counts[: len(old)]) if count == before and old[at] >= new[dim]]
    longer = [at for at in places if old[at] > 1]
    return next(iter(longer or places), -1)
