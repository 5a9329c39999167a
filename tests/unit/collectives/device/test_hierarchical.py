"""Verbs on arrays of devices in groups on several nodes: devices copy from each other in a node, rails cross."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commlib.collectives import rails
from commlib.config.settings import Config
from commlib.dtypes import DTYPES
from commlib.errors import MismatchError, PeerError, UsageError
from commlib.node.device_board import DeviceBoard
from tests.bodies import checks, loopback
from tests.late import LATE, OnDevice
from tests.oracles.oracle import REDUCIBLE

CONFIG = Config(timeout=10, device_slot_kib=64, staging_kib=8)  # larger arrays go in pieces

# Even and uneven nodes, ranks numbered node by node or in turn, three nodes.
CLUSTERS = ([0, 0, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 2, 2])

clusters = pytest.mark.parametrize("nodes", CLUSTERS, ids=lambda nodes: "".join(map(str, nodes)))
verbs = pytest.mark.parametrize("verb", ["all_to_all", "all_reduce", "broadcast", "all_gather", "reduce_scatter"])
ways = pytest.mark.parametrize("devices", [(), ("late",)], ids=["staged", "direct"])


@pytest.fixture(autouse=True)
def late_device(monkeypatch):
    monkeypatch.setattr(LATE, "has_signals", True)


ordered = pytest.mark.usefixtures("no_races")


@pytest.fixture(autouse=True)
def all_rails(monkeypatch):
    """Let small calls use all rails, too."""
    monkeypatch.setattr(rails, "RAIL_BYTES", 1)


@pytest.fixture(params=["all rails", "one rail"])
def number_of_rails(request, monkeypatch):
    if request.param == "one rail":
        monkeypatch.setattr(rails, "RAIL_BYTES", 1 << 30)


def run(nodes, function, devices=(), config=CONFIG):
    """Run it on ranks that are threads, each with a stream of its own."""

    def check(comm):
        with LATE.using(LATE.stream()):
            return function(comm)

    return loopback.run(len(nodes), check, nodes=nodes, config=config, devices=devices)


@ordered
@clusters
@ways
def test_reductions_match_numpy(nodes, devices, number_of_rails):
    def check(comm):
        there = OnDevice(comm)
        for dtype, op in REDUCIBLE[len(nodes) :: 37]:
            for shape in ((0, 3), (7, 3), (2001, 3)):
                checks.reduce_scatter(there, dtype, shape, op)
            checks.all_reduce(there, dtype, (5001,), op)
        checks.reduce_scatter(there, "bfloat16", (3000,), "mean", "hierarchical")

    run(nodes, check, devices)


@ordered
@clusters
@ways
def test_movement_matches_numpy(nodes, devices, number_of_rails):
    def check(comm):
        there = OnDevice(comm)
        for dtype in DTYPES[:: len(DTYPES) - 1]:
            for shape in ((), (0,), (2001,)):
                for root in range(comm.size):
                    checks.broadcast(there, dtype, shape, root)
                checks.all_gather(there, dtype, shape)
            for part in ((0,), (1,), (201, 3)):
                checks.all_to_all(there, dtype, part)
        for verb in (checks.broadcast, checks.all_gather, checks.all_to_all):
            verb(there, "float32", (50,), algorithm="hierarchical")

    run(nodes, check, devices)


@ordered
@clusters
@ways
def test_the_host_bus_carries_only_network_data(nodes, devices, monkeypatch):
    """A node's data leaves it once and arrives once; no copy to the host where messages use device memory."""
    copied = []
    copy = LATE.copy

    def counting(target, source):
        if isinstance(target, np.ndarray) or isinstance(source, np.ndarray):
            copied.append(target.nbytes)
        copy(target, source)

    monkeypatch.setattr(LATE, "copy", counting)
    size, chunk = len(nodes), 700
    of_node = [nodes.count(node) for node in set(nodes)]
    elsewhere = sum(n * (size - n) for n in of_node)  # pairs of ranks that are not on one node

    def check(comm):
        one, all_ = (LATE.put(np.ones(n * chunk, np.float32)) for n in (1, size))
        crossed = {}
        for verb, x in (("broadcast", one), ("all_gather", one), ("all_to_all", all_), ("reduce_scatter", all_)):
            getattr(comm, verb)(x)
            LATE.synchronise()
            comm.barrier()
            copied.clear()
            comm.barrier()
            getattr(comm, verb)(x)
            LATE.synchronise()
            comm.barrier()
            crossed[verb] = sum(copied) / (4 * chunk)
            comm.barrier()
        return crossed

    for crossed in run(nodes, check, devices):
        if devices:
            assert not any(crossed.values())
            continue
        assert crossed["broadcast"] == len(of_node)  # out of one node, into each other node
        assert crossed["all_gather"] == size + sum(size - n for n in of_node)
        assert crossed["all_to_all"] == 2 * elsewhere
        assert crossed["reduce_scatter"] == len(of_node) * size + size


@ordered
def test_results_may_be_read_and_sources_written_at_once():
    """Calls of two groups in turn, started and waited for in another order; their arrays are reused at once."""

    def check(comm):
        other, size = comm.split(0), comm.size
        for step in range(4):
            mine = np.arange(size * 900, dtype=np.float32) + 10_000 * comm.rank + step
            everyone = [mine + 10_000 * (rank - comm.rank) for rank in range(size)]
            arrays = [LATE.put(mine) for _ in range(4)]
            works = [
                comm.reduce_scatter_async(arrays[0]),
                other.all_gather_async(arrays[1]),
                comm.all_to_all_async(arrays[2]),
                other.broadcast_async(arrays[3], root=step),
            ]
            results = [work.wait() for work in works]
            for array in arrays[:3]:
                LATE.kernels.fill(LATE.wrap(array, "x"), 99)
            part = slice(comm.rank * 900, (comm.rank + 1) * 900)
            np.testing.assert_array_equal(results[0].numpy(), np.sum(everyone, axis=0)[part])
            np.testing.assert_array_equal(results[1].numpy(), np.concatenate(everyone))
            np.testing.assert_array_equal(results[2].numpy(), np.concatenate([each[part] for each in everyone]))
            np.testing.assert_array_equal(results[3].numpy(), everyone[step])

    run([0, 1, 0, 1, 0], check)


@ordered
def test_verbs_work_in_place():
    def check(comm):
        rank, size, rows = comm.rank, comm.size, 3000
        part = slice(rank * rows, (rank + 1) * rows)
        mine = np.arange(size * rows, dtype=np.float32) + 10_000 * rank
        everyone = [mine + 10_000 * (other - rank) for other in range(size)]
        x = LATE.put(mine)
        assert comm.all_gather(x[part], out=x) is x
        own = [each[other * rows : (other + 1) * rows] for other, each in enumerate(everyone)]
        np.testing.assert_array_equal(x.numpy(), np.concatenate(own))
        x = LATE.put(mine)
        np.testing.assert_array_equal(comm.all_to_all(x, out=x).numpy(), np.concatenate([e[part] for e in everyone]))
        x = LATE.put(mine)
        np.testing.assert_array_equal(comm.reduce_scatter(x, out=x[part]).numpy(), np.sum(everyone, axis=0)[part])

    run([0, 1, 0, 1, 0], check)


@verbs
@pytest.mark.parametrize("odd", [(0,), (4,), (1, 3)], ids=["on a rail", "on no rail", "a node"])
def test_late_mismatches_raise_on_all_ranks(verb, odd, monkeypatch):
    """Too late for a comparison beforehand: all ranks raise, also those that send nothing, and no stream waits."""
    if len(odd) > 1:
        monkeypatch.setattr(rails, "RAIL_BYTES", 1 << 30)  # one rail: of each node one rank sends

    def check(comm):
        x = LATE.put(np.ones(3000, np.float32))
        for _ in range(3):
            getattr(comm, verb)(x)
        with pytest.raises(MismatchError) as caught:
            getattr(comm, verb)(x[:2000] if comm.rank in odd else x)
            assert verb == "broadcast" and comm.rank in (0, 2, 4)  # ranks next to the root have all their data
            comm.barrier()
        x.numpy()
        message = str(caught.value)
        assert any(f"rank {rank}: {verb} of " in message for rank in odd) and "2000" in message and "3000" in message

    run([0, 1, 0, 1, 0], check, config=replace(CONFIG, check_first=2))


@verbs
@pytest.mark.parametrize("odd", [1, 4])
def test_a_rank_that_fails_is_named(verb, odd):
    """On the other ranks, whose streams do not wait for it."""

    def check(comm):
        x = LATE.put(np.ones(3000, np.float32))
        getattr(comm, verb)(x)
        if comm.rank == odd:
            comm.group.abandon("a call", ValueError("on the way"))
            return
        with pytest.raises(PeerError, match=f"rank {odd}"):
            getattr(comm, verb)(x)
        x.numpy()

    run([0, 1, 0, 1, 0], check)


def test_slots_too_small_for_the_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(DeviceBoard, "part_bytes", lambda board, parts: 32)

    def check(comm):
        with pytest.raises(UsageError, match="COMMLIB_DEVICE_SLOT_KIB"):
            comm.all_to_all(LATE.put(np.ones(40, "complex128")))

    run([0, 0, 1, 1], check)
