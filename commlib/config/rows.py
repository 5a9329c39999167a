"""Describe every setting in words, for `commlib info` and for the page of settings in docs/."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any

from commlib.config.settings import Config, variable

_UNLIMITED = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, all in text. `differs` says in which sense ranks may have different values; "": they may not."""

    field: str  # of Config
    variable: str  # COMMLIB_...
    default: str
    values: str
    meaning: str
    differs: str


def rows() -> tuple[Row, ...]:
    """Return the settings in the order of `Config`."""
    return tuple(
        Row(
            field.name,
            variable(field.name),
            value_text(field.default),
            _values(field),
            field.metadata["meaning"],
            field.metadata["differs"],
        )
        for field in fields(Config)
    )


def value_text(value: Any) -> str:
    """Return a value as it is written in the environment; 1 and 0 for true and false."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(field: Field[Any]) -> str:
    limits = field.metadata
    if limits["choices"]:
        return ", ".join(limits["choices"])
    if field.type == "bool":
        return "0, 1"
    if field.type == "str":
        return "text"
    kind = "whole number" if field.type == "int" else "number"
    if limits["most"] >= _UNLIMITED:
        return f"{kind} from {limits['least']}"
    return f"{kind} from {limits['least']} to {limits['most']}"
