"""OpRequest: describe a named operation in a form that ranks can compare before it runs. [pure]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Shape = tuple[int | None, ...]
"""Lengths that must be equal on all ranks; None is a length that may differ between ranks."""


class OpRequest(NamedTuple):
    """The description of one named operation on one rank. Ranks that submit the same operation have equal requests."""

    verb: str
    name: str
    tensors: tuple[tuple[str, Shape], ...] = ()
    """The dtype and the shape of each tensor."""
    options: tuple[tuple[str, str | int | float], ...] = ()
    """Other properties that must be equal: the reduction, scales, root and device type."""
    repeats: bool = True
    """Whether the name will be submitted again. Only then does caching it pay."""

    def __str__(self) -> str:
        return f"{self.verb} {self.name!r}"

    def option(self, key: str, default: str | int | float = "") -> str | int | float:
        """Return the value of one option."""
        for name, value in self.options:
            if name == key:
                return value
        return default


def fields_of(request: OpRequest) -> dict[str, str]:
    """Return all properties that must be equal, by their names in messages."""
    return {
        "verb": request.verb,
        "number of tensors": str(len(request.tensors)),
        "dtype": _format_list(dtype for dtype, _ in request.tensors),
        "shape": _format_list(_format_shape(shape) for _, shape in request.tensors),
        **{key: str(value) for key, value in request.options},
    }


def describe_difference(requests: Mapping[int, OpRequest]) -> str:
    """Return the differences between the requests of several ranks under one name, or "" if they are equal.

    Example: "shape is (2,) on rank 0 but (3,) on ranks 1, 2".
    """
    everyone = {rank: fields_of(request) for rank, request in sorted(requests.items())}
    keys = dict.fromkeys(key for fields in everyone.values() for key in fields)
    differences = []
    for key in keys:
        by_value: dict[str, list[int]] = {}
        for rank, fields in everyone.items():
            by_value.setdefault(fields.get(key, "not given"), []).append(rank)
        if len(by_value) > 1:
            differences.append(
                f"{key} is " + " but ".join(f"{value} on {format_ranks(who)}" for value, who in by_value.items())
            )
            if key == "verb":
                break  # other properties of different verbs cannot be compared
    return "; ".join(differences)


def format_ranks(numbers: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def quote_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, quoted, and the number of others; "nothing" for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more if names else "nothing"


def _format_list(texts: object) -> str:
    items = list(texts)  # type: ignore[call-overload]
    return str(items[0]) if len(items) == 1 else f"[{', '.join(items)}]"


def _format_shape(shape: Shape) -> str:
    lengths = ["any" if length is None else str(length) for length in shape]
    return f"({', '.join(lengths)}{',' if len(lengths) == 1 else ''})"
