"""Overdue operations: named operations that have waited long."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from commlib.coordinator.pending_op import StallInspector


def waiting(**waited: float) -> dict[str, Any]:
    now = time.monotonic()
    return {name: SimpleNamespace(since=now - seconds, warned=False) for name, seconds in waited.items()}


@pytest.mark.parametrize(
    ("patience", "expected"),
    [
        (StallInspector(warning=60, timeout=0), {"oldest": False, "old": False}),  # never too long
        (StallInspector(warning=60, timeout=90), {"oldest": True, "old": False}),
        (StallInspector(warning=60, timeout=30), {"oldest": True, "old": True, "middle": True}),
        (StallInspector(warning=1000, timeout=0), {}),
    ],
)
def test_overdue_operations_are_listed(patience: StallInspector, expected: dict[str, bool]) -> None:
    assert patience.overdue(waiting(oldest=100, old=70, middle=40, young=1)) == expected


def test_a_warning_comes_once_and_the_timeout_still_applies() -> None:
    operations = waiting(old=70)
    operations["old"].warned = True
    assert StallInspector(warning=60, timeout=0).overdue(operations) == {}
    assert StallInspector(warning=60, timeout=65).overdue(operations) == {"old": True}
