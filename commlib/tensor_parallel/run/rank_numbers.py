"""Per-rank numbers: integers of modules, such as heads, that a plan splits among ranks with `PerRank`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.run.number_proxy import set_number
from commlib.tensor_parallel.styles import PerRank, Style

_DIVIDED = "commlib_numbers"
_WHOLE = "commlib_whole_numbers"


class ModuleNumber(NamedTuple):
    """An integer attribute of a module; with `at` an element of a tuple attribute, or an attribute of an object."""

    module: Any
    name: str
    at: int | str = -1

    @property
    def value(self) -> int:
        """The current value."""
        number: Any = vars(self.module)[self.name]
        if isinstance(self.at, str):
            number = getattr(number, self.at)
        elif self.at >= 0:
            number = number[self.at]
        own: int = number
        return own

    def put(self, value: int) -> None:
        """Set the value."""
        number: Any = value
        if isinstance(self.at, str):
            number = set_number(vars(self.module)[self.name], self.at, value)
        elif self.at >= 0:
            own = vars(self.module)[self.name]
            number = (*own[: self.at], value, *own[self.at + 1 :])
        vars(self.module)[self.name] = number

    @property
    def own_name(self) -> str:
        """Its name within its module."""
        return self.name if self.at == -1 else f"{self.name}.{self.at}"


def check_numbers(numbers: Mapping[str, tuple[ModuleNumber, PerRank]], size: int) -> None:
    """Raise UsageError unless each of `size` ranks gets its part of these numbers."""
    for name, (number, style) in numbers.items():
        units, ranks = style.units or number.value, style.among or size
        if number.own_name in numbers_of(number.module):
            raise UsageError(f"plan: {name} is sharded already, as {numbers_of(number.module)[number.own_name]}")
        if number.value % units or units < ranks:
            raise UsageError(f"plan: {name} is {number.value}, which {ranks} ranks cannot split in {units} units")


def split_numbers(numbers: Mapping[str, tuple[ModuleNumber, PerRank]], axis: ParallelAxis) -> None:
    """Set the numbers of modules to this rank's part."""
    for number, style in numbers.values():
        own, name = vars(number.module), number.own_name
        if name not in numbers_of(number.module):  # it may have several names
            own[_WHOLE] = {**own.get(_WHOLE, {}), name: number.value}
            number.put(style.own(number.value, axis.rank, axis.size))
            own[_DIVIDED] = {**numbers_of(number.module), name: style}


def numbers_of(module: Any) -> dict[str, PerRank]:
    """Return the styles of a module's split numbers."""
    numbers: dict[str, PerRank] = vars(module).get(_DIVIDED, {})
    return numbers


def whole_numbers_of(module: Any) -> dict[ModuleNumber, int]:
    """Return the original values of a module's split numbers."""
    numbers: dict[str, int] = vars(module).get(_WHOLE, {})
    return {_number(module, name): value for name, value in numbers.items()}


def numbers_of_rank(
    numbers: Mapping[str, ModuleNumber], styles: Mapping[str, Style], axis: ParallelAxis
) -> list[tuple[ModuleNumber, int]]:
    """Return this rank's values of numbers that are not split yet."""
    return [
        (numbers[name], style.own(numbers[name].value, axis.rank, axis.size))
        for name, style in styles.items()
        if isinstance(style, PerRank) and name in numbers
    ]


@contextmanager
def change_numbers(changes: Sequence[tuple[ModuleNumber, int]]) -> Iterator[None]:
    """Set numbers to other values within a context."""
    own = [(number, number.value) for number, _ in changes]
    try:
        for number, value in changes:
            number.put(value)
        yield
    finally:
        for number, value in reversed(own):
            number.put(value)


def _number(module: Any, name: str) -> ModuleNumber:
    attribute, _, at = name.partition(".")
    return ModuleNumber(module, attribute, at if at and not at.isdigit() else int(at or -1))
