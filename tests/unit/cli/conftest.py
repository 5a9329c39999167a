"""Tests of the command's output have no terminal, and no claimed width: pytest-xdist sets COLUMNS in its workers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
