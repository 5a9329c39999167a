"""scatter of a device's arrays: ranks other than the root learn of them only within the call."""

from __future__ import annotations

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import UsageError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies import checks
from tests.bodies.device_paths import count
from tests.late import LATE, LateArray, OnDevice

pytestmark = [pytest.mark.usefixtures("no_races"), pytest.mark.any_mpi, pytest.mark.any_ranks]
ways = pytest.mark.parametrize("way", ["blocking", "async", "plan", "started plan"])


@pytest.fixture(scope="module", params=["staged", "direct", "peers", "between"])
def comm(request):
    """All ranks, through the host, by messages of device memory, and between the devices of a node.

    The latter read each other's memory, or share host memory.
    """
    world, way = commlib.init(), request.param
    settings = Config(
        timeout=20, device_slot_kib=64, device_peers=way in ("peers", "between"), device_ipc=way == "peers"
    )
    devices = {"late"} if way == "direct" else set()
    transport = MpiTransport(world.native.Dup(), longest=1 << 16, devices=devices)
    created = Communicator(transport, Runtime(settings, world.runtime.ranks_on_node), f"scatter {way}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        yield created
        created.close()


def scattered(comm, way, x, **options):
    if way == "blocking":
        return comm.scatter(x, **options)
    if way == "async":
        return comm.scatter_async(x, **options).wait()
    plan = comm.plan_scatter(x, **options)
    return plan() if way == "plan" else plan.start().wait()


def parts(comm, count, first=0.0):
    """Return the root's array (None elsewhere) and this rank's expected part."""
    whole = first + np.arange(float(comm.size * count))
    part = whole[comm.rank * count : (comm.rank + 1) * count]
    return (LATE.put(whole) if comm.rank == 0 else None), part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("part", [(0,), (1,), (5, 3), (3000,), (40_000,)])
def test_every_root(comm, dtype, part):
    for root in range(comm.size):
        checks.scatter(OnDevice(comm), dtype, part, root=root)


@ways
def test_every_way_to_call_it(comm, way):
    x, part = parts(comm, 700)
    result = scattered(comm, way, x)
    assert isinstance(result, LateArray)
    np.testing.assert_array_equal(result.numpy(), part)
    out = LATE.empty((700,), "float64")
    assert scattered(comm, way, x, out=out) is out
    np.testing.assert_array_equal(out.numpy(), part)


@ways
@pytest.mark.parametrize("passes_out", [False, True])
def test_it_follows_the_order_of_the_callers_stream(comm, monkeypatch, way, passes_out):
    """Earlier work has filled the root's array and used the others'; later work sees the part."""
    monkeypatch.setattr(LATE, "delay", 0.03)
    with LATE.using(LATE.stream()):
        x, part = parts(comm, 300)
        out = LATE.put(np.full(300, -1.0)) if passes_out else None
        used = None if out is None else LATE.wrap(out, "out").copy().owner
        later = LATE.wrap(scattered(comm, way, x, out=out), "x").copy().owner
        np.testing.assert_array_equal(later.numpy(), part)
        if used is not None:
            np.testing.assert_array_equal(used.numpy(), np.full(300, -1.0))


@ways
def test_a_results_memory_belongs_to_the_callers_stream(comm, monkeypatch, way):
    """Freed while queued work still read it, it was reused for something else: it belonged to another stream."""
    monkeypatch.setattr(LATE, "delay", 0.05)
    with LATE.using(LATE.stream()):
        x, part = parts(comm, 300)
        result = scattered(comm, way, x)
        copy = LATE.empty((300,), "float64")
        LATE.copy(LATE.wrap(copy, "kept"), LATE.wrap(result, "made"))
        del result
        next_result = scattered(comm, way, x)
        np.testing.assert_array_equal(copy.numpy(), part)
        np.testing.assert_array_equal(next_result.numpy(), part)


def test_the_result_may_be_a_part_of_the_roots_array(comm):
    x, part = parts(comm, 300)
    out = LATE.empty((300,), "float64") if x is None else x[100:400] if comm.size > 1 else x[:300]
    assert comm.scatter(x, out=out) is out
    np.testing.assert_array_equal(out.numpy(), part)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("bad", ["root", "another rank"])
def test_an_error_on_one_rank_does_not_fail_the_others(comm, bad):
    x, part = parts(comm, 300)
    is_bad = (comm.rank == 0) == (bad == "root")
    for wrong in (np.empty(300), LATE.empty((299,), "float64")):
        if is_bad:
            with pytest.raises(UsageError, match="scatter: "):
                comm.scatter(x, out=wrong)
        else:
            np.testing.assert_array_equal(comm.scatter(x).numpy(), part)
    np.testing.assert_array_equal(comm.scatter(x).numpy(), part)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("when", ["never", "too late"])
def test_a_rank_without_the_device_gets_an_error(comm, monkeypatch, when):
    x, part = parts(comm, 300)
    last = comm.rank == comm.size - 1
    if last and when == "never":
        monkeypatch.setattr("commlib.devices.arrays.find_named", lambda name: None)
        with pytest.raises(UsageError, match="'late', but this rank has none"):
            comm.scatter()
    elif last:
        monkeypatch.setattr("commlib.collectives.verbs.scatter.streams", dict)
        with pytest.raises(UsageError, match="this rank had used none before the call"):
            comm.scatter()
    else:
        np.testing.assert_array_equal(comm.scatter(x).numpy(), part)


def test_host_arrays_work_as_before(comm):
    checks.scatter(comm, "float32", (5, 3), root=comm.size - 1)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("algorithm", ["auto", "node"])
def test_it_takes_the_expected_path(comm, algorithm):
    """Between devices nothing goes through the host, or by messages of device memory."""
    x, _ = parts(comm, 30_000)
    comm.scatter(x, algorithm=algorithm)
    counted = count(comm, lambda: comm.scatter(x, algorithm=algorithm))
    between = comm.group.config.device_peers
    assert (counted.copies > 0) == (not between and (algorithm == "node" or not comm.group.transport.accepts("late")))
    assert (counted.messages > 0) == (not between and counted.copies == 0)
