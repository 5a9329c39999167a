"""Root: check the root argument of a verb."""

from __future__ import annotations

from typing import Any

from commlib.errors import UsageError
from commlib.group.arguments import integer
from commlib.group.group import Group


def check_root(group: Group, verb: str, root: Any) -> int:
    """Return `root` as an int. Raises UsageError unless it is a rank of the group."""
    rank = integer(verb, "root", root)
    if not 0 <= rank < group.size:
        raise UsageError(f"{verb}: root is {root}, but {group.name} has the ranks 0 to {group.size - 1}")
    return rank
