"""Groups: keep gradients together that the user wants to travel together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from commlib.errors import UsageError

Groups = int | tuple[tuple[Hashable, ...], ...]
"""How many groups to make, or the keys of the members of each."""


def read_groups(groups: Any, key: Callable[[Any], Hashable]) -> Groups:
    """Return what was given as `groups=`; 0 for none. `key` says what a member is known by, and refuses what is none.

    Raises UsageError, which is a ValueError, for what is no number and no list of lists, and for a member named twice.
    """
    if groups is None:
        return 0
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(f"groups must be a non-negative number or a list of lists of parameters, got {groups}")
        return groups
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise UsageError("groups must be a non-negative number or a list of lists of parameters")
    seen: set[Hashable] = set()
    found = []
    for place, group in enumerate(groups):
        members = []
        for member in group:
            try:
                known_by = key(member)
            except TypeError as error:
                raise UsageError(
                    f"groups must consist of {error}, but group {place} has a {type(member).__name__}"
                ) from None
            if known_by in seen:
                raise UsageError(f"a parameter may appear only once in groups, but one is in group {place} again")
            seen.add(known_by)
            members.append(known_by)
        found.append(tuple(members))
    return tuple(found)


def place_groups(
    groups: Groups, keys: Sequence[Hashable], known: Collection[Hashable] | None = None
) -> list[list[int]]:
    """Return the groups as numbers of `keys`. A number of groups deals them out in order, as equally as can be.

    `known` may be named although they are not among `keys`, such as frozen parameters; None allows everything.
    Raises UsageError for members that are neither.
    """
    if isinstance(groups, int):
        count = min(groups, len(keys))
        bounds = [len(keys) * number // count for number in range(count + 1)] if count else [0]
        return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
    numbers = {key: number for number, key in enumerate(keys)}
    found = []
    for place, group in enumerate(groups):
        members = [numbers[key] for key in group if key in numbers]
        if known is not None and not all(key in numbers or key in known for key in group):
            raise UsageError(f"group {place} has a tensor that is no parameter of the optimizer")
        if members:
            found.append(members)
    return found
