"""Per-module numbers: share an object, such as a configuration, among modules with other numbers for one of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class NumberProxy:
    """A proxy of an object that replaces some numbers, and follows its other changes. It reports the object's class."""

    __class__ = property(lambda self: type(unwrap_number(self)))

    def __init__(self, whole: Any, numbers: Mapping[str, int]) -> None:
        vars(self).update({_WHOLE: whole, _NUMBERS: dict(numbers)})

    def __getattr__(self, name: str) -> Any:
        numbers = vars(self)[_NUMBERS]
        return numbers[name] if name in numbers else getattr(vars(self)[_WHOLE], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)[_WHOLE], name, value)

    def __deepcopy__(self, memo: Any) -> NumberProxy:
        return NumberProxy(copy.deepcopy(vars(self)[_WHOLE], memo), vars(self)[_NUMBERS])

    def __copy__(self) -> NumberProxy:
        return NumberProxy(copy.copy(vars(self)[_WHOLE]), vars(self)[_NUMBERS])


_WHOLE, _NUMBERS = "commlib_whole", "commlib_numbers"


def unwrap_number(value: Any) -> Any:
    """Return the object behind the proxy, or the object itself."""
    return vars(value)[_WHOLE] if type(value) is NumberProxy else value


def set_number(value: Any, name: str, number: int) -> Any:
    """Return an object with another number; the object itself if no number differs from it."""
    whole = unwrap_number(value)
    numbers = {**(vars(value)[_NUMBERS] if value is not whole else {}), name: number}
    if type(number) is int and vars(whole)[name] == number:
        del numbers[name]
    return NumberProxy(whole, numbers) if numbers else whole
