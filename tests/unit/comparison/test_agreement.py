"""What ranks say of values is the same for the same values."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from commlib.comparison.agreement import describe


def _made(sign: int) -> Any:
    return (lambda x: x in {"a", "b"}) if sign > 0 else (lambda x: x in {"a", "c"})


def test_functions_are_told_by_what_they_do() -> None:
    """Addresses of partial functions differ on ranks; names of lambdas do not say which they are."""
    assert describe(math.sqrt) == "math.sqrt"
    assert describe(functools.partial(pow, 2, mod=3)) == "partial(builtins.pow, 2, mod=3)"
    assert (
        describe(str.upper) == describe("".join).replace("join", "upper") == "builtins.str.upper"
    )  # methods of no module
    assert describe(functools.partial(list.append, [])) == "partial(builtins.list.append, [])"
    assert describe(_made(1)) == describe(_made(1)) != describe(_made(-1))
    assert describe(functools.partial(_made(1), 1)) != describe(functools.partial(_made(-1), 1))


@pytest.mark.parametrize("value", [lambda: lambda x: x, functools.partial(lambda x: {x}, _made(1))])
def test_nothing_of_a_process_is_told(value: Any) -> None:
    assert " at 0x" not in describe(value)
