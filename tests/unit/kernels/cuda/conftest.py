"""Run every kernel with workers of one lane, and in the full run with those of 32, as a GPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.launcher import HostLauncher

LANES = [1, pytest.param(32, marks=pytest.mark.long)]


@pytest.fixture(scope="module", autouse=True, params=LANES, ids="{} lanes".format)
def lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostLauncher, "lanes", request.param)
        yield
