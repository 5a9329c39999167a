"""all_gather_v of a device's arrays: between the devices of a node, through the host, by messages of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import MismatchError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies import checks
from tests.bodies.device_paths import count
from tests.late import LATE, LateArray, OnDevice

pytestmark = pytest.mark.usefixtures("no_races")


@pytest.fixture(scope="module", params=["staged", "direct", "peers", "between"])
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """All ranks; "between" uses host memory that all their devices address."""
    world, way = commlib.init(), request.param
    settings = Config(
        timeout=20, device_slot_kib=64, device_peers=way in ("peers", "between"), device_ipc=way == "peers"
    )
    transport = MpiTransport(world.native.Dup(), devices={"late"} if way == "direct" else set())
    created = Communicator(transport, Runtime(settings, world.runtime.ranks_on_node), f"rows {way}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        yield created
        created.close()


def uses_device_memory(comm: Communicator) -> bool:
    return comm.size > 1 and comm.name.removeprefix("rows ") in ("peers", "between")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("lengths", ["none", "one", "few", "many", "unlike"])
def test_any_lengths(comm: Any, dtype: str, lengths: str) -> None:
    """Also none at all, or of one rank only, and more than a slot can hold."""
    counts = {
        "none": [0] * comm.size,
        "one": [0] * (comm.size - 1) + [3],
        "few": list(range(comm.size)),
        "many": [20_000 + 7 * rank for rank in range(comm.size)],
        "unlike": [90_001 if rank == 0 else rank % 2 for rank in range(comm.size)],
    }[lengths]
    for caller in (OnDevice(comm), OnDevice(checks.Twins(comm))):
        checks.all_gather_v(caller, dtype, counts, (3,) if lengths != "many" else ())


def test_the_host_copies_nothing(comm: Any) -> None:
    x = LATE.put(np.full((5000 + comm.rank, 2), comm.rank, np.float32))
    counted = count(comm, lambda: comm.all_gather_v(x))
    if uses_device_memory(comm):
        assert counted.copies == counted.messages == 0


def test_symmetric_memory(comm: Any) -> None:
    """Parts of it at the same place on all ranks are not copied to a slot."""
    whole = comm.empty((comm.size * 30_000,), "float32", device=LATE)
    own = whole[: 20_000 + 100 * comm.rank]
    LATE.kernels.fill(LATE.wrap(own, "own"), comm.rank + 1)
    gathered = comm.all_gather_v(own)
    assert isinstance(gathered, LateArray)
    expected = np.repeat(np.arange(1, comm.size + 1, dtype=np.float32), [20_000 + 100 * r for r in range(comm.size)])
    np.testing.assert_array_equal(gathered.numpy(), expected)


def test_it_follows_the_order_of_the_callers_stream(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LATE, "delay", 0.02)
    lengths = [3 + rank for rank in range(comm.size)]
    with LATE.using(LATE.stream()):
        for step in range(3):
            x = LATE.put(np.full(lengths[comm.rank], 10 * step + comm.rank, np.int32))
            gathered = comm.all_gather_v(x)
            del x  # its memory is reused as soon as this stream gets there
            expected = np.repeat([10 * step + rank for rank in range(comm.size)], lengths)
            np.testing.assert_array_equal(gathered.numpy(), expected)


@pytest.mark.ranks(min=2)
def test_ranks_that_disagree(comm: Any) -> None:
    x = LATE.put(np.zeros((4, 2 + (comm.rank == 1)), np.float32))
    with pytest.raises(MismatchError, match="all_gather_v"):
        comm.all_gather_v(x)
    np.testing.assert_array_equal(comm.all_gather_v(LATE.put(np.ones(1))).numpy(), np.ones(comm.size))
