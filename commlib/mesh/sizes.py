"""Sizes of axes: infer a missing size, and suggest sizes if the product does not match."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from commlib.errors import UsageError

INFERRED = -1

Sizes = Sequence[tuple[str, Any]]

_MOST_DIVISORS = 16  # in a message


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: neighbours along it are `stride` ranks apart."""

    name: str
    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Return a rank's coordinate along this axis."""
        return rank // self.stride % self.size


def make_axes(what: str, wanted: Sizes, total: int, ranks: str, stride: int = 1) -> tuple[Axis, ...]:
    """Return axes whose sizes have the product `total`; the last axis is the fastest, with the given stride.

    what, ranks: texts for the call and the total in errors. Raises UsageError.
    """
    if not wanted:
        raise UsageError(f"{what}: no axis: give at least one, such as dp=-1")
    for name, _ in wanted:
        _check_name(what, name)
    names = [name for name, _ in wanted]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{what}: axis {repeated[0]} is given {names.count(repeated[0])} times; names must differ")
    sizes = _infer(what, [(name, _size(what, name, size)) for name, size in wanted], total, ranks)
    strides = [stride * prod(sizes[index + 1 :]) for index in range(len(sizes))]
    return tuple(Axis(*axis) for axis in zip(names, sizes, strides, strict=True))


def text_of(sizes: Sizes) -> str:
    """Format sizes: "pp=2, dp=-1, tp=2"."""
    return ", ".join(f"{name}={size}" for name, size in sizes)


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{what}: {name!r} is not a valid axis name: expected an identifier such as 'tp'")


def _size(what: str, name: str, size: Any) -> int:
    try:
        number = INFERRED - 1 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        number = INFERRED - 1
    if number < 1 and number != INFERRED:
        raise UsageError(f"{what}: {name} is {size!r}; expected a positive integer, or -1 to infer it")
    return number


def _infer(what: str, sizes: list[tuple[str, int]], total: int, ranks: str) -> list[int]:
    missing = [name for name, size in sizes if size == INFERRED]
    if len(missing) > 1:
        raise UsageError(
            f"{what}: {' and '.join(missing)} have no size, but only one can be inferred; give all but one"
        )
    fixed = prod(size for _, size in sizes if size != INFERRED)
    if missing and total % fixed == 0:
        return [total // fixed if size == INFERRED else size for _, size in sizes]
    if not missing and fixed == total:
        return [size for _, size in sizes]
    known = [str(size) for _, size in sizes if size != INFERRED]
    product = f"{' x '.join(known)} = {fixed}" if len(known) > 1 else f"{sizes[0][0]} is {fixed}"
    if not missing:
        raise UsageError(f"{what}: {product}, but there are {ranks}; {_suggest_inferred(sizes, total)}")
    known_product = f"{' x '.join(known)} = {fixed}" if len(known) > 1 else str(fixed)
    raise UsageError(
        f"{what}: {known_product} does not divide {ranks}, so {missing[0]} cannot be inferred; "
        f"{_suggest_changes(sizes, total)}"
    )


def _suggest_inferred(sizes: list[tuple[str, int]], total: int) -> str:
    """Suggest axes to infer from the other sizes, with the size of each."""
    product = prod(size for _, size in sizes)
    choices = [(name, product // size) for name, size in sizes if total % (product // size) == 0]
    if not choices:
        return _divisors_text(total)
    return "; ".join(f"with {name}=-1 it would be {total // others}" for name, others in choices)


def _suggest_changes(sizes: list[tuple[str, int]], total: int) -> str:
    """Suggest other sizes for one axis with which the axis with -1 could be inferred."""
    known = [(name, size) for name, size in sizes if size != INFERRED]
    product = prod(size for _, size in known)
    choices = [(name, total // (product // size)) for name, size in known if total % (product // size) == 0]
    if not choices:
        return _divisors_text(total)
    return "; ".join(f"{name} could be {_alternatives(_divisors(left))}" for name, left in choices)


def _divisors_text(total: int) -> str:
    return f"every size must divide {total}: {_alternatives(_divisors(total))}"


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _alternatives(numbers: Sequence[int]) -> str:
    if len(numbers) > _MOST_DIVISORS:
        return f"{', '.join(map(str, numbers[: _MOST_DIVISORS - 1]))}, ... or {numbers[-1]}"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
