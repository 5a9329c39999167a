"""Fixtures for tests over MPI: a late device with both kinds of transfer, and detection of races."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from commlib.communicator import Communicator

pytest_plugins = ["tests.plugins.multirank"]


@pytest.fixture(scope="module", params=["staged", "direct"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """All ranks, with the late device's arrays staged through host memory and passed to MPI directly.

    MPI can do that because they really are in host memory. Its messages are then cut at 64 KiB, on both sides.
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
    """Fail a test that reads memory of the late device before it is ready, or writes it while it is being read."""
    from tests.late import LATE

    races = LATE.races
    yield
    assert LATE.races == races
