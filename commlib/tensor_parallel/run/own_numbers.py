"""Own numbers: an object that many modules share, as a configuration, with other numbers for one of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class OwnNumbers:
    """An object as it is, and goes on to be, but for some numbers. To others it is of that object's class."""

    __class__ = property(lambda self: type(whole_of(self)))

    def __init__(self, whole: Any, numbers: Mapping[str, int]) -> None:
        vars(self).update({_WHOLE: whole, _NUMBERS: dict(numbers)})

    def __getattr__(self, name: str) -> Any:
        numbers = vars(self)[_NUMBERS]
        return numbers[name] if name in numbers else getattr(vars(self)[_WHOLE], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)[_WHOLE], name, value)

    def __deepcopy__(self, memo: Any) -> OwnNumbers:
        return OwnNumbers(copy.deepcopy(vars(self)[_WHOLE], memo), vars(self)[_NUMBERS])

    def __copy__(self) -> OwnNumbers:
        return OwnNumbers(copy.copy(vars(self)[_WHOLE]), vars(self)[_NUMBERS])


_WHOLE, _NUMBERS = "commlib_whole", "commlib_numbers"


def whole_of(value: Any) -> Any:
    """Return the object without numbers that are one module's."""
    return vars(value)[_WHOLE] if type(value) is OwnNumbers else value


def with_number(value: Any, name: str, number: int) -> Any:
    """Return an object with another number; itself, without any that are one module's, where it is the same."""
    whole = whole_of(value)
    numbers = {**(vars(value)[_NUMBERS] if value is not whole else {}), name: number}
    if type(number) is int and vars(whole)[name] == number:
        del numbers[name]
    return OwnNumbers(whole, numbers) if numbers else whole
