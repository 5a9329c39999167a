"""Arguments: checks shared by all verbs."""

from __future__ import annotations

import operator
from typing import Any

from commlib.errors import UsageError
from commlib.group.group import Group


def integer(verb: str, name: str, value: Any) -> int:
    """Return an argument as an int. Raises UsageError unless it is a Python or numpy integer."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise UsageError(f"{verb}: {name} is {value!r} ({type(value).__name__}), expected an integer")


def check_root(group: Group, verb: str, root: Any) -> int:
    """Return `root` as an int. Raises UsageError unless it is a rank of the group."""
    rank = integer(verb, "root", root)
    if not 0 <= rank < group.size:
        raise UsageError(f"{verb}: root is {root}, but {group.name} has the ranks 0 to {group.size - 1}")
    return rank
