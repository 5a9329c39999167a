"""Name parameters, for messages and for saved state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from commlib.errors import UsageError

T = TypeVar("T")
Named = tuple[str, T]


def drop_duplicates(named: Iterable[Named[T]]) -> list[Named[T]]:
    """Return each object once, under its first name, in order. Raises UsageError if two objects have the same name."""
    seen: set[int] = set()
    names: set[str] = set()
    result: list[Named[T]] = []
    for name, parameter in named:
        if id(parameter) in seen:
            continue
        if name in names:
            raise UsageError(f"two parameters are named {name!r}")
        seen.add(id(parameter))
        names.add(name)
        result.append((name, parameter))
    return result


def ids_in(groups: Sequence[dict[str, Any]]) -> set[int]:
    """Return the ids of an optimizer's parameters, which `groups` lists under "params"."""
    return {id(parameter) for group in groups for parameter in group["params"]}


def name_parameters(
    groups: Sequence[dict[str, Any]], named: Sequence[Named[Any]] | None, *, strict: bool = True
) -> list[Named[Any]]:
    """Return an optimizer's parameters with their names: in the order of `named`, then those without a name.

    Raises UsageError for an item that is not a pair of a name and a parameter, for a repeated name and, if `strict`,
    for a trainable parameter without a name.
    """
    mine = {
        id(parameter): (f"group {number}, parameter {position}", parameter)
        for number, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
    }
    for item in named or ():
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise UsageError("named_parameters must be (name, parameter) pairs, as model.named_parameters() returns")
    chosen = [(name, parameter) for name, parameter in drop_duplicates(named or ()) if mine.pop(id(parameter), None)]
    left = list(mine.values())
    missing = [name for name, parameter in left if parameter.requires_grad]
    if named is not None and missing and strict:
        raise UsageError(f"named_parameters lacks parameters of the optimizer: {'; '.join(missing)}")
    return drop_duplicates([*chosen, *left])
