"""Groups: keep gradients in one bucket if the user wants them to travel together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from commlib.errors import UsageError

Groups = int | tuple[tuple[Hashable, ...], ...]
"""The number of groups to make, or the keys of each group's members."""


def read_groups(groups: Any, key: Callable[[Any], Hashable]) -> Groups:
    """Return the `groups=` argument in a checked form; 0 without groups.

    `key` returns the key of a member, and raises TypeError for an invalid member. Raises UsageError, which is a
    ValueError, if the argument is neither a number nor a list of lists, or if it names a member twice.
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
    result = []
    for place, group in enumerate(groups):
        members = []
        for member in group:
            try:
                known_by = key(member)
            except TypeError as error:
                raise UsageError(
                    f"groups must consist of {error}, but group {place} contains a {type(member).__name__}"
                ) from None
            if known_by in seen:
                raise UsageError(f"a parameter may appear only once in groups, but group {place} repeats one")
            seen.add(known_by)
            members.append(known_by)
        result.append(tuple(members))
    return tuple(result)


def place_groups(
    groups: Groups, keys: Sequence[Hashable], known: Collection[Hashable] | None = None
) -> list[list[int]]:
    """Return the groups as numbers of `keys`. A number of groups splits the keys in order, as equally as possible.

    Groups may also name the keys in `known` that are not in `keys`, such as frozen parameters; None allows all keys.
    Raises UsageError for other members.
    """
    if isinstance(groups, int):
        count = min(groups, len(keys))
        bounds = [len(keys) * number // count for number in range(count + 1)] if count else [0]
        return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
    numbers = {key: number for number, key in enumerate(keys)}
    result = []
    for place, group in enumerate(groups):
        members = [numbers[key] for key in group if key in numbers]
        if known is not None and not all(key in numbers or key in known for key in group):
            raise UsageError(f"group {place} contains a tensor that is not a parameter of the optimizer")
        if members:
            result.append(members)
    return result
