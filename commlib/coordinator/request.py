"""Request: describe a named operation, so that ranks can compare it before it runs. [pure]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Shape = tuple[int | None, ...]
"""Lengths that must agree; None is a length that may differ among ranks."""


class Request(NamedTuple):
    """Describe one named operation as one rank asks for it. Ranks that ask for the same have equal requests."""

    verb: str
    name: str
    tensors: tuple[tuple[str, Shape], ...] = ()
    """The dtype and the shape of each tensor."""
    options: tuple[tuple[str, str | int | float], ...] = ()
    """What else must agree: the operation, scales, root and kind of device."""
    repeats: bool = True
    """It will be asked for again under this name, so it is worth a place in the cache."""

    def __str__(self) -> str:
        return f"{self.verb} {self.name!r}"

    def option(self, key: str, default: str | int | float = "") -> str | int | float:
        """Return one option."""
        for name, value in self.options:
            if name == key:
                return value
        return default


def fields_of(request: Request) -> dict[str, str]:
    """Return everything that must agree, by what it is called in messages."""
    return {
        "verb": request.verb,
        "number of tensors": str(len(request.tensors)),
        "dtype": _listed(dtype for dtype, _ in request.tensors),
        "shape": _listed(_text(shape) for _, shape in request.tensors),
        **{key: str(value) for key, value in request.options},
    }


def describe_difference(said: Mapping[int, Request]) -> str:
    """Return in what the requests of several ranks, of one name, differ, or "" if they are equal.

    Such as "shape is (2,) on rank 0 but (3,) on ranks 1, 2".
    """
    everyone = {rank: fields_of(request) for rank, request in sorted(said.items())}
    keys = dict.fromkeys(key for fields in everyone.values() for key in fields)
    found = []
    for key in keys:
        by_value: dict[str, list[int]] = {}
        for rank, fields in everyone.items():
            by_value.setdefault(fields.get(key, "not given"), []).append(rank)
        if len(by_value) > 1:
            found.append(f"{key} is " + " but ".join(f"{value} on {ranks(who)}" for value, who in by_value.items()))
            if key == "verb":
                break  # of another verb nothing else can be compared
    return "; ".join(found)


def ranks(numbers: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, quoted, and how many more there are; "nothing" for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more if names else "nothing"


def _listed(texts: object) -> str:
    items = list(texts)  # type: ignore[call-overload]
    return str(items[0]) if len(items) == 1 else f"[{', '.join(items)}]"


def _text(shape: Shape) -> str:
    lengths = ["any" if length is None else str(length) for length in shape]
    return f"({', '.join(lengths)}{',' if len(lengths) == 1 else ''})"
