"""Fixtures for collectives on the late device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.late import LATE


@pytest.fixture
def no_races() -> Iterator[None]:
    """Fail a test with a read of data before its arrival, or a write during a read."""
    races = LATE.races
    yield
    assert LATE.races == races
