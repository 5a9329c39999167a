"""Numbers that modules keep, such as heads, of which each rank has its part where a plan says `PerRank`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.run.own_numbers import with_number
from commlib.tensor_parallel.styles import PerRank, Style

_DIVIDED = "commlib_numbers"
_WHOLE = "commlib_whole_numbers"


class Number(NamedTuple):
    """An attribute of a module that is an integer; or with `at` one of a tuple of them, or that of an object."""

    module: Any
    name: str
    at: int | str = -1

    @property
    def value(self) -> int:
        """What it is now."""
        found: Any = vars(self.module)[self.name]
        if isinstance(self.at, str):
            found = getattr(found, self.at)
        elif self.at >= 0:
            found = found[self.at]
        own: int = found
        return own

    def put(self, value: int) -> None:
        """Let it be something else."""
        found: Any = value
        if isinstance(self.at, str):
            found = with_number(vars(self.module)[self.name], self.at, value)
        elif self.at >= 0:
            own = vars(self.module)[self.name]
            found = (*own[: self.at], value, *own[self.at + 1 :])
        vars(self.module)[self.name] = found

    @property
    def own_name(self) -> str:
        """How it is called within its module."""
        return self.name if self.at == -1 else f"{self.name}.{self.at}"


def check_numbers(found: Mapping[str, tuple[Number, PerRank]], size: int) -> None:
    """Raise UsageError unless each of `size` ranks gets its part of these numbers."""
    for name, (number, style) in found.items():
        units, ranks = style.units or number.value, style.among or size
        if number.own_name in numbers_of(number.module):
            raise UsageError(f"plan: {name} is divided already, as {numbers_of(number.module)[number.own_name]}")
        if number.value % units or units < ranks:
            raise UsageError(
                f"plan: {name} is {number.value}, which is not divided among {ranks} ranks in {units} units"
            )


def divide_numbers(found: Mapping[str, tuple[Number, PerRank]], axis: Axis) -> None:
    """Give modules this rank's parts of their numbers."""
    for number, style in found.values():
        own, name = vars(number.module), number.own_name
        if name not in numbers_of(number.module):  # it may have several names
            own[_WHOLE] = {**own.get(_WHOLE, {}), name: number.value}
            number.put(style.own(number.value, axis.rank, axis.size))
            own[_DIVIDED] = {**numbers_of(number.module), name: style}


def numbers_of(module: Any) -> dict[str, PerRank]:
    """Return the styles of a module's numbers that are divided."""
    found: dict[str, PerRank] = vars(module).get(_DIVIDED, {})
    return found


def whole_numbers_of(module: Any) -> dict[Number, int]:
    """Return what a module's numbers that are divided were before."""
    found: dict[str, int] = vars(module).get(_WHOLE, {})
    return {_number(module, name): value for name, value in found.items()}


def numbers_of_rank(numbers: Mapping[str, Number], styles: Mapping[str, Style], axis: Axis) -> list[tuple[Number, int]]:
    """Return what numbers of modules that are not divided would be on this rank."""
    return [
        (numbers[name], style.own(numbers[name].value, axis.rank, axis.size))
        for name, style in styles.items()
        if isinstance(style, PerRank) and name in numbers
    ]


@contextmanager
def changed_numbers(changes: Sequence[tuple[Number, int]]) -> Iterator[None]:
    """Let numbers be others for a while."""
    own = [(number, number.value) for number, _ in changes]
    try:
        for number, value in changes:
            number.put(value)
        yield
    finally:
        for number, value in reversed(own):
            number.put(value)


def _number(module: Any, name: str) -> Number:
    attribute, _, at = name.partition(".")
    return Number(module, attribute, at if at and not at.isdigit() else int(at or -1))
