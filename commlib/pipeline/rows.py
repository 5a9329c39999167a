"""Rows: which dimension of each value of a batch has its rows, as a user says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from commlib.errors import UsageError

WHOLE = "whole"
"""Instead of a dimension: all microbatches are given the whole value, or give the same."""

REMEDY = 'say so with rows= of pipeline(), such as rows={"x": (0, "whole")} or rows={"output": (0, 1)}'


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of x, y and the model's output are: a dimension, "whole", or a nest of these like the value."""

    x: Any = 0
    y: Any = 0
    output: Any = 0


def rows_option(rows: Mapping[str, Any] | None) -> Rows:
    """Return where rows are, as `pipeline` takes it. Raises UsageError for what says nothing."""
    given = dict(rows or {})
    if unknown := sorted(set(given) - {"x", "y", "output"}):
        raise UsageError(f"pipeline: rows has {', '.join(map(repr, unknown))}, expected x, y or output")
    for name, where in given.items():
        _check(name, where)
    return Rows(**given)


def _check(name: str, where: Any) -> None:
    if isinstance(where, Mapping | tuple | list):
        for inner in where.values() if isinstance(where, Mapping) else where:
            _check(name, inner)
    elif where != WHOLE and (not isinstance(where, int) or where < 0):
        raise UsageError(f'pipeline: rows says {where!r} of {name}, expected a dimension from 0 on, or "whole"')


def each(function: Callable[..., Any], where: Any, *values: Any) -> Any:
    """Return a nest of what a function makes of where the rows are, and of the leaves of nests that are alike.

    where: for all leaves, or a nest; of a dict, what is not named has them first. Raises UsageError if it does not fit.
    """
    first = values[0]
    if isinstance(first, Mapping):
        if isinstance(where, Mapping):
            if unknown := [name for name in where if name not in first]:
                raise UsageError(f"pipeline: rows names {unknown[0]!r}; there are {', '.join(map(str, first))}")
        elif isinstance(where, tuple | list):
            raise UsageError(f"pipeline: rows says {where} of a dict; expected a dict by its names, or one dimension")
        found = {
            name: each(
                function, where.get(name, 0) if isinstance(where, Mapping) else where, *(v[name] for v in values)
            )
            for name in first
        }
        return found if type(first) is dict else type(first)(found)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        if isinstance(where, Mapping) or (isinstance(where, tuple | list) and len(where) != len(first)):
            raise UsageError(f"pipeline: rows says {where} of {len(first)} values; expected as many dimensions")
        inner = where if isinstance(where, tuple | list) else [where] * len(first)
        parts = [each(function, place, *own) for place, *own in zip(inner, *values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(where, Mapping | tuple | list):
        raise UsageError(f"pipeline: rows says {where} of one value; expected a dimension")
    return function(where, *values)
