"""Equations: relate the dimensions of an operation's result to its inputs' dimensions, as in einsum. [pure]

Each dimension has a number: equal numbers are the same dimension. `~n` is a dimension of length 1 that is broadcast
along n. A number missing in the result is summed, averaged or otherwise reduced. The computation itself is left out.

    softmax of (rows, words) over words     Equation(((0, 1),), (0, 1), needs={1})
    (rows, columns) + (1, columns)          Equation(((0, 1), (~0, 1)), (0, 1))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from commlib.errors import UsageError

Shape = tuple[int, ...]

NEW = 1 << 20
"""A new dimension of the result."""

UNKNOWN_LENGTH = 1 << 30
"""The length of a dimension that is not known during tracing."""


@dataclass(frozen=True, slots=True)
class Equation:
    """The dimension numbers of each input and of the result. needs: dimensions that must not be sharded."""

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    needs: frozenset[int] = frozenset()


def pointwise(*shapes: Shape) -> Equation:
    """Return the equation of an element-wise operation, with shapes that are broadcast as in numpy."""
    rank = max(map(len, shapes), default=0)
    longest = [max((shape[at - rank] for shape in shapes if len(shape) >= rank - at), default=1) for at in range(rank)]
    return Equation(tuple(_align(shape, longest) for shape in shapes), tuple(range(rank)))


def dimwise(shape: Shape, dims: Collection[int]) -> Equation:
    """Return the equation of an operation that needs full dimensions and keeps them: softmax, norms, sorting."""
    every = tuple(range(len(shape)))
    return Equation((every,), every, frozenset(dim % len(shape) for dim in dims))


def reduction(shape: Shape, dims: Collection[int], *, keeps_dims: bool = False) -> Equation:
    """Return the equation of sums, means and extremes over some dimensions. keeps_dims: with length 1."""
    reduced = {dim % len(shape) for dim in dims}
    every = tuple(range(len(shape)))
    output = tuple(NEW if dim in reduced else dim for dim in every if keeps_dims or dim not in reduced)
    return Equation((every,), output)


def selection(rank: int, dims: Sequence[int]) -> Equation:
    """Return the equation of transposing, slicing and picking: `dims` has for each dimension of the result the equal
    dimension of the input, or -1. Input dimensions that are sliced or picked from must not be sharded.
    """
    every = tuple(range(rank))
    dropped = frozenset(every).difference(dims)
    return Equation((every,), tuple(NEW if dim < 0 else dim for dim in dims), dropped)


def product(left: Shape, right: Shape) -> Equation:
    """Return the equation of a product of matrices or vectors, with or without batch dimensions."""
    rows, columns, between = NEW - 1, NEW - 2, NEW - 3
    batch = pointwise(left[:-2], right[:-2])
    first = (*batch.inputs[0], rows)[: len(left) - 1]
    second = (*batch.inputs[1], between)[: len(right) - 1] if len(right) > 1 else ()
    last = (columns,) if len(right) > 1 else ()
    output = (*batch.output, *((rows,) if len(left) > 1 else ()), *last)
    return Equation(((*first, between), (*second, *last) if last else (between,)), output)


def attention(query: Shape, key: Shape, value: Shape) -> Equation:
    """Return the equation of attention: (..., queries, features), (..., keys, features), (..., keys, outputs)."""
    batch = pointwise(query[:-2], key[:-2], value[:-2])
    queries, keys, features, outputs = NEW - 1, NEW - 2, NEW - 3, NEW - 4
    ends = ((queries, features), (keys, features), (keys, outputs))
    inputs = tuple((*front, *end) for front, end in zip(batch.inputs, ends, strict=True))
    return Equation(inputs, (*batch.output, queries, outputs), frozenset((keys, features)))


def einsum(text: str, shapes: Sequence[Shape]) -> Equation:
    """Return the equation of einsum's notation, including an ellipsis."""
    operands, arrow, output = text.replace(" ", "").partition("->")
    terms = operands.split(",")
    if len(terms) != len(shapes):
        raise UsageError(f"einsum {text!r} has {len(terms)} operands, got {len(shapes)}")
    if not arrow:
        letters = sorted({letter for letter in operands if letter.isalpha() and operands.count(letter) == 1})
        output = ("..." if "..." in operands else "") + "".join(letters)
    rest = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    width = max((count for term, count in zip(terms, rest, strict=True) if "..." in term), default=0)
    inputs = tuple(_numbers(term, count, width) for term, count in zip(terms, rest, strict=True))
    return Equation(inputs, _numbers(output, width, width))


def _align(shape: Shape, longest: Sequence[int]) -> tuple[int, ...]:
    first = len(longest) - len(shape)
    return tuple(
        ~(first + at) if length == 1 and longest[first + at] != 1 else first + at for at, length in enumerate(shape)
    )


def _numbers(term: str, count: int, width: int) -> tuple[int, ...]:
    """Return letters by their codes; the dimensions of an ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    middle = range(width - count, width) if dots else ()
    return (*map(ord, before), *(NEW + 1 + number for number in middle), *map(ord, after))
