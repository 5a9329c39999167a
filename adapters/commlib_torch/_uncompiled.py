"""Functions that torch.compile calls as they are: what travels between ranks is no part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Return a function that graphs break around. The compiler would else follow it into the core, and trace that."""
    found: _F = torch.compiler.disable(function)  # which has no types
    return found
