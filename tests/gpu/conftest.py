"""Fixtures for tests of GPUs: on a real one where available, else on CuPy's stand-in, which is host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.gpu.ways import WAYS

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from tests.cuda.gpu import Gpu

pytest_plugins = ["tests.plugins.multirank"]

# What a machine with a GPU must have, so that it does not test the stand-in unnoticed.
REAL = os.environ.pop("COMMLIB_TEST_GPU", "") == "real"


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    from tests.cuda.gpu import gpu

    this_gpu = gpu()
    if REAL and not this_gpu.is_real:
        pytest.exit("COMMLIB_TEST_GPU=real, and this process finds no GPU", returncode=3)
    return this_gpu


@pytest.fixture(scope="module", params=WAYS)
def comm(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[Communicator]:
    """All ranks; with peer access to their GPUs' memory, with host memory between them, or with everything staged."""
    import commlib
    from commlib.communicator import Communicator
    from commlib.config.settings import Config
    from commlib.runtime.process import Runtime
    from commlib.transport.mpi import MpiTransport

    world = commlib.init()
    way = {"device_peers": request.param != "staged", "device_ipc": request.param == "peers"}
    settings = Config(timeout=20, nccl=False, device_slot_kib=256, **way)
    runtime = Runtime(settings, world.runtime.ranks_on_node)
    group = Communicator(MpiTransport(world.native.Dup()), runtime, f"gpu {request.param}")
    yield group
    group.close()


@pytest.fixture(autouse=True)
def well_behaved(gpu: Gpu) -> Iterator[None]:
    """Fail a test in which the stand-in saw what a GPU would not forgive."""
    from tests.cuda import standin

    races = standin.ENGINE.races
    yield
    assert standin.ENGINE.races == races
    assert not standin.VIOLATIONS
