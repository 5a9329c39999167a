"""Arguments: check what all verbs ask of them."""

from __future__ import annotations

import operator
from typing import Any

from commlib.errors import UsageError


def integer(verb: str, name: str, value: Any) -> int:
    """Return an argument that must be a whole number, of Python's or numpy's kind. Raises UsageError for others."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise UsageError(f"{verb}: {name} is {value!r} ({type(value).__name__}), expected an integer")
