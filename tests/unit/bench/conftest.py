"""Unit tests start no MPI: what the command line does before it measures is tested where jobs are started."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_init(monkeypatch):
    """MPI once started in a process of all unit tests, and the logger that `init` sets up, changed what others saw."""
    monkeypatch.setattr("commlib.init", lambda: None)
