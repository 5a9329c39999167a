"""Functions that torch.compile calls as they are: what travels between ranks is no part of a graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Return a function that graphs break around. The compiler would else follow it into the core, and trace that.

    The compiler is loaded when it is first used: that takes a second, which most programs that import this do without.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if "disabled" not in vars(called):
            vars(called)["disabled"] = torch.compiler.disable(function)
        return vars(called)["disabled"](*args, **kwargs)

    return cast(_F, called)
