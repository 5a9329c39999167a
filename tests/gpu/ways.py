"""Paths of data, as parameters of the fixture `comm`."""

from __future__ import annotations

import pytest

WAYS = ("peers", "between", "staged")

# For tests that take long: one path in the usual run.
EACH_WAY = pytest.mark.parametrize(
    "comm", [WAYS[0], *(pytest.param(way, marks=pytest.mark.long) for way in WAYS[1:])], indirect=True
)
