"""Fixtures for tests over MPI: a device with arrays that go both ways, and with races that are seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from commlib.communicator import Communicator

pytest_plugins = ["tests.plugins.multirank"]


@pytest.fixture(scope="module", params=["staged", "direct"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """All ranks, with the late device's arrays through host memory, and with MPI taking them as they are.

    They are host memory, in truth, so MPI can. Its messages are then cut at 64 KiB, on both sides.
    """
    import commlib
    from commlib.communicator import Communicator
    from commlib.config.settings import Config
    from commlib.runtime.process import Runtime
    from commlib.transport.mpi import MpiTransport

    world = commlib.init()
    if request.param == "staged":
        yield world
        return
    runtime = Runtime(Config(timeout=20), world.runtime.ranks_on_node)
    group = Communicator(MpiTransport(world.native.Dup(), longest=1 << 16, devices={"late"}), runtime)
    yield group
    group.close()


@pytest.fixture
def no_races() -> Iterator[None]:
    """Fail a test in which something was read of the late device before it was there, or written while it was read."""
    from tests.late import LATE

    races = LATE.races
    yield
    assert LATE.races == races
