"""Fixtures: this process' GPU, or CuPy's stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda import standin
from tests.cuda.gpu import Gpu
from tests.cuda.gpu import gpu as find


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return find()


@pytest.fixture(autouse=True)
def well_behaved() -> Iterator[None]:
    """Fail a test in which the stand-in saw an access that is an error on a GPU."""
    races = standin.ENGINE.races
    yield
    assert standin.ENGINE.races == races
    assert not standin.VIOLATIONS


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin.ENGINE, "delay", 0.05)
