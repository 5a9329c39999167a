"""Held: what puts an object back as it was, in place, and what is kept by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

EMPTY = object()
"""What is where nothing is."""


@dataclass(frozen=True, slots=True)
class Held:
    """What puts an object back, and the objects that are kept by it.

    restore: returns, if it cannot, what it has found to be changed, in words.
    """

    restore: Callable[[], object] | None = None
    inside: Iterable[Any] = ()


def each(restores: Iterable[Callable[[], object] | None]) -> object:
    """Put several things back; return the first that is said of one that cannot be."""
    every = [restore() for restore in restores if restore is not None]
    return next((one for one in every if one is not None), None)


def same(now: list[Any], before: list[Any]) -> bool:
    """Return whether the same objects are there: none is asked whether it equals another."""
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))
