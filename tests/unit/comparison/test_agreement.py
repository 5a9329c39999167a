"""What ranks say of values is the same for the same values."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from commlib.comparison.agreement import said


def _made(sign: int) -> Any:
    return (lambda x: x in {"a", "b"}) if sign > 0 else (lambda x: x in {"a", "c"})


def test_functions_are_told_by_what_they_do() -> None:
    """Addresses of partial functions differ on ranks; names of lambdas do not say which they are."""
    assert said(math.sqrt) == "math.sqrt"
    assert said(functools.partial(pow, 2, mod=3)) == "partial(builtins.pow, 2, mod=3)"
    assert said(str.upper) == said("".join).replace("join", "upper") == "builtins.str.upper"  # methods of no module
    assert said(functools.partial(list.append, [])) == "partial(builtins.list.append, [])"
    assert said(_made(1)) == said(_made(1)) != said(_made(-1))
    assert said(functools.partial(_made(1), 1)) != said(functools.partial(_made(-1), 1))


@pytest.mark.parametrize("value", [lambda: lambda x: x, functools.partial(lambda x: {x}, _made(1))])
def test_nothing_of_a_process_is_told(value: Any) -> None:
    assert " at 0x" not in said(value)
