"""Arguments: checks shared by all verbs."""

from __future__ import annotations

import operator
from typing import Any

from commlib.errors import UsageError


def integer(verb: str, name: str, value: Any) -> int:
    """Return an argument as an int. Raises UsageError unless it is a Python or numpy integer."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise UsageError(f"{verb}: {name} is {value!r} ({type(value).__name__}), expected an integer")
