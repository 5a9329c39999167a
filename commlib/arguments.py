"""Arguments: checks that several calls share; the nearest name for a misspelled one; extras to install. [pure]"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from commlib.errors import UsageError

_LEAST = 0.6  # similarity, from 0 to 1


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


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name most similar to `name`, whatever its case and separators; "" if none is similar."""
    from difflib import SequenceMatcher, get_close_matches  # imports `re`; errors are rare

    text, by_letters = str(name), defaultdict[str, list[str]](list)
    for each in known:
        by_letters[_letters(each)].append(each)
    matches = get_close_matches(_letters(text), by_letters, 1, _LEAST)
    # Names with the same letters, such as all_reduce and allreduce_.
    return max(by_letters[matches[0]], key=lambda each: SequenceMatcher(None, text, each).ratio()) if matches else ""


def suggest(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the end of an error's text; "" if no known name is similar."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def missing_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that `owner` ("module 'x'") lacks."""
    # Tools probe for many special names.
    hint = "" if name.startswith("__") else suggest(name, known)
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")


def install(*extras: str) -> str:
    """Return an instruction, for a message, to install one of these extras.

    The name commlib on PyPI belongs to another project, so the command installs from this checkout.
    """
    commands = " or ".join(f'pip install ".[{extra}]"' for extra in extras)
    named = " or ".join(f"'{extra}'" for extra in extras)
    return f"install this project with its extra {named}: {commands} in its checkout"


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
