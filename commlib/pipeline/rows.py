"""Rows: the dimension of the rows in each value of a batch, as given by the option `rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.errors import UsageError

WHOLE = "whole"
"""Instead of a dimension: all microbatches get the entire value, or return the same one."""

REMEDY = 'pass rows= to pipeline(), such as rows={"x": (0, "whole")} or rows={"output": (0, 1)}'


@dataclass(frozen=True, slots=True)
class Rows:
    """The location of the rows in x, y and the model's output: a dimension, "whole", or a nest of these."""

    x: Any = 0
    y: Any = 0
    output: Any = 0


def rows_option(rows: Mapping[str, Any] | None) -> Rows:
    """Return the locations of rows from the option of `pipeline`. Raises UsageError for an invalid option."""
    if rows is not None and not isinstance(rows, Mapping):
        raise UsageError(f"pipeline: rows is {rows!r}, expected a dict with some of x, y and output")
    options = dict(rows or {})
    if unknown := sorted(set(options) - {"x", "y", "output"}):
        raise UsageError(f"pipeline: rows has {', '.join(map(repr, unknown))}, expected x, y or output")
    for name, where in options.items():
        _check(name, where)
    return Rows(**options)


def _check(name: str, where: Any) -> None:
    if isinstance(where, Mapping | tuple | list):
        for inner in where.values() if isinstance(where, Mapping) else where:
            _check(name, inner)
    elif where != WHOLE and (not isinstance(where, int) or where < 0):
        raise UsageError(f'pipeline: rows has {where!r} for {name}, expected a dimension of at least 0 or "whole"')


def each(function: Callable[..., Any], where: Any, *values: Any) -> Any:
    """Apply a function to the location of the rows and to the leaves of nests of equal structure; return the results.

    where: one location for all leaves, or a nest; names missing in a dict default to 0. Raises UsageError for another
    structure.
    """
    first = values[0]
    if isinstance(first, Mapping):
        if isinstance(where, Mapping):
            if unknown := [name for name in where if name not in first]:
                raise UsageError(
                    f"pipeline: rows has the unknown name {unknown[0]!r}; expected some of {', '.join(map(str, first))}"
                )
        elif isinstance(where, tuple | list):
            raise UsageError(f"pipeline: rows has {where} for a dict; expected a dict with its names, or one dimension")
        result = {
            name: each(
                function, where.get(name, 0) if isinstance(where, Mapping) else where, *(v[name] for v in values)
            )
            for name in first
        }
        return result if type(first) is dict else type(first)(result)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        if isinstance(where, Mapping) or (isinstance(where, tuple | list) and len(where) != len(first)):
            raise UsageError(f"pipeline: rows has {where} for {len(first)} values; expected as many dimensions")
        inner = where if isinstance(where, tuple | list) else [where] * len(first)
        parts = [each(function, place, *own) for place, *own in zip(inner, *values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(where, Mapping | tuple | list):
        raise UsageError(f"pipeline: rows has {where} for one value; expected a dimension")
    return function(where, *values)


def number_of_rows(tensors: Iterable[tuple[Any, Sequence[int]]], what: str, none: str = "no tensor with rows") -> int:
    """Return the number of rows of tensors: (location of the rows, shape). Raises UsageError unless there is one.

    what: names the tensors in errors. none: describes them if none has rows.
    """
    counts = set()
    for place, shape in tensors:
        if not len(shape) or place == WHOLE:
            continue
        if place >= len(shape):
            raise UsageError(f"pipeline: {what}: rows gives dimension {place} for a tensor of shape {tuple(shape)}")
        counts.add(int(shape[place]))
    if len(counts) != 1:
        got = f"{len(counts)} different numbers: {', '.join(map(str, sorted(counts)))}" if counts else none
        raise UsageError(
            f"pipeline: {what}: expected tensors with equal numbers of rows (first dimension), got {got}; if rows are "
            f"in another dimension, or a tensor is for all microbatches, {REMEDY}"
        )
    return counts.pop()


def check_parts(parts: Any, microbatches: int, what: str) -> None:
    """Raise UsageError if microbatches that a user has cut are not a list, or too many."""
    if not isinstance(parts, list | tuple) or not 0 < len(parts) <= microbatches:
        got = f"{len(parts)} microbatches" if isinstance(parts, list | tuple) else type(parts).__name__
        raise UsageError(f"pipeline: {what}: expected a list of at most {microbatches} microbatches, got {got}")


def pad_microbatches(
    parts: Any, microbatches: int, what: str, count: Callable[[Any, str], int]
) -> tuple[list[Any], list[int]]:
    """Return microbatches that a user has cut, and the rows of each; missing ones at the end have none.

    count: returns the number of rows of a microbatch, given its name in errors. Raises UsageError if they are not a
    list, or too many, or if one without rows is not at the end.
    """
    check_parts(parts, microbatches, what)
    missing = microbatches - len(parts)
    counts = [count(part, f"{what}[{number}]") for number, part in enumerate(parts)]
    if 0 in counts[: len(counts) - counts[::-1].count(0)]:
        raise UsageError(f"pipeline: {what}: microbatches without rows must be the last ones, got {counts} rows")
    return [*parts, *[None] * missing], [*counts, *[0] * missing]


def check_result(shape: Sequence[int], place: int, rows: int, what: str) -> None:
    """Raise UsageError unless a result of a microbatch has its number of rows in this dimension."""
    if place >= len(shape) or shape[place] != rows:
        raise UsageError(
            f"pipeline: a microbatch of {rows} rows has {what} of shape {tuple(shape)}, so its rows are not in "
            f"dimension {place}: {REMEDY}"
        )
