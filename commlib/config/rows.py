"""Rows of text for every setting, for `commlib info` and for the settings page in docs/."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any

from commlib.config.settings import Config, variable

_UNLIMITED = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as text. `differs`: how ranks may have different values ("per rank", ...); "": they may not."""

    field: str  # of Config
    variable: str  # COMMLIB_...
    default: str
    values: str
    meaning: str
    differs: str


def rows() -> tuple[SettingRow, ...]:
    """Return the settings in the order of `Config`."""
    return tuple(
        SettingRow(
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
    """Format a value as in the environment; 1 and 0 for true and false."""
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
