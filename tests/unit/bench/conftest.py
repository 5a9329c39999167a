"""Unit tests start no MPI: tests that start jobs cover what the command line does before it measures."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_init(monkeypatch):
    """MPI, once started in the process of the unit tests, and the logger of `init` changed other tests' results."""
    monkeypatch.setattr("commlib.init", lambda: None)
