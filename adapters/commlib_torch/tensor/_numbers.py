"""Numbers: integers that modules keep, such as heads, of which each rank has its part where a plan says `PerRank`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.tensor.styles import PerRank, Style
from commlib_torch.tensor._leaves import is_leaf

_DIVIDED = "commlib_numbers"
_WHOLE = "commlib_whole_numbers"


class Number(NamedTuple):
    """An attribute of a module."""

    module: nn.Module
    name: str

    @property
    def value(self) -> int:
        found: int = vars(self.module)[self.name]
        return found


def numbers_in(model: nn.Module) -> dict[str, Number]:
    """Return the integers of modules that are no single layers, by names such as "h.0.attn.num_heads"."""
    return {
        f"{path}.{name}" if path else name: Number(module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        if not is_leaf(module)
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }


def check_numbers(found: Mapping[str, tuple[Number, PerRank]], size: int) -> None:
    """Raise UsageError unless each of `size` ranks gets its part of these numbers."""
    for name, (number, style) in found.items():
        units = style.units or number.value
        if number.name in numbers_of(number.module):
            raise UsageError(f"plan: {name} is divided already, as {numbers_of(number.module)[number.name]}")
        if number.value % units or units < size:
            raise UsageError(
                f"plan: {name} is {number.value}, which is not divided among {size} ranks in {units} units"
            )


def divide_numbers(found: Mapping[str, tuple[Number, PerRank]], axis: Axis) -> None:
    """Give modules this rank's parts of their numbers."""
    for number, style in found.values():
        if number.name not in numbers_of(number.module):  # it may have several names
            setattr(number.module, _WHOLE, {**whole_numbers_of(number.module), number.name: number.value})
            setattr(number.module, number.name, style.own(number.value, axis.rank, axis.size))
            setattr(number.module, _DIVIDED, {**numbers_of(number.module), number.name: style})


def numbers_of(module: nn.Module) -> dict[str, PerRank]:
    """Return the styles of a module's numbers that are divided."""
    found: dict[str, PerRank] = vars(module).get(_DIVIDED, {})
    return found


def whole_numbers_of(module: nn.Module) -> dict[str, int]:
    """Return what a module's numbers that are divided were before."""
    found: dict[str, int] = vars(module).get(_WHOLE, {})
    return found


def styles_of_numbers(model: nn.Module) -> dict[str, Style]:
    """Return the styles of the numbers that are divided already."""
    named: Any = model.named_modules()
    return {f"{path}.{name}": style for path, module in named for name, style in numbers_of(module).items()}
