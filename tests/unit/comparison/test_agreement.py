"""Descriptions of values are the same on all ranks for the same values."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from commlib.comparison.agreement import describe


def _adder(sign: int) -> Any:
    return (lambda x: x in {"a", "b"}) if sign > 0 else (lambda x: x in {"a", "c"})


def test_functions_are_identified_by_their_code() -> None:
    """Addresses of partial functions differ on ranks; names of lambdas do not identify them."""
    assert describe(math.sqrt) == "math.sqrt"
    assert describe(functools.partial(pow, 2, mod=3)) == "partial(builtins.pow, 2, mod=3)"
    assert (
        describe(str.upper) == describe("".join).replace("join", "upper") == "builtins.str.upper"
    )  # methods without a module
    assert describe(functools.partial(list.append, [])) == "partial(builtins.list.append, [])"
    assert describe(_adder(1)) == describe(_adder(1)) != describe(_adder(-1))
    assert describe(functools.partial(_adder(1), 1)) != describe(functools.partial(_adder(-1), 1))


@pytest.mark.parametrize("value", [lambda: lambda x: x, functools.partial(lambda x: {x}, _adder(1))])
def test_descriptions_contain_nothing_of_the_process(value: Any) -> None:
    assert " at 0x" not in describe(value)
