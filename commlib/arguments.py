"""Arguments: checks that several calls share. [pure]"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from commlib.errors import UsageError


def read_flag(argument: str, value: Any, *, may_be_none: bool = False) -> Any:
    """Return a flag as True or False, or None if it may be None. Raises UsageError for other values than these or 0, 1.

    argument: its name, for errors.
    """
    if value is None and may_be_none:
        return None
    of_numpy = getattr(value, "dtype", None) == "bool" and getattr(value, "shape", None) == ()
    if of_numpy or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise UsageError(f"{argument} is {value!r}, expected {'True, False or None' if may_be_none else 'True or False'}")


def list_of(call: str, expected: str, value: Any) -> list[Any]:
    """Return the items of an argument as a list. Raises UsageError unless it is iterable.

    call, expected: for errors, such as "grouped_allreduce" and "a list of tensors".
    """
    try:
        items = iter(value)
    except TypeError:
        raise UsageError(f"{call}: expected {expected}, got {describe_type(value)}") from None
    return list(items)


def whole_numbers(value: Iterable[Any]) -> list[int] | None:
    """Return the items of an argument as ints; None if some are not whole numbers."""
    try:
        return [operator.index(number) for number in value]
    except TypeError:
        return None


def describe_type(value: Any) -> str:
    """Return the type of a wrong argument, for errors, with short values."""
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, bool | int | float | str) and len(repr(value)) < 40 else kind
