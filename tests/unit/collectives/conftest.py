"""Fixtures for collectives on the late device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.late import LATE


@pytest.fixture
def no_races() -> Iterator[None]:
    """Fail a test in which something was read before it was there, or written while it was read."""
    races = LATE.races
    yield
    assert LATE.races == races
