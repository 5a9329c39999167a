"""Collectives between the devices of a node's ranks, on the late device: ranks are threads that share its memory."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.dtypes import DTYPES
from commlib.errors import MismatchError, PeerError, TransportError, UsageError
from commlib.node.device_board import DeviceBoard
from tests.bodies import checks, loopback
from tests.late import LATE, OnDevice
from tests.oracles.oracle import REDUCIBLE

CONFIG = Config(timeout=10, device_slot_kib=64)  # larger arrays go through the slots in pieces
SIZES = ((), (0,), (5, 3), (3000,), (70_001,))

ranks = pytest.mark.parametrize("size", [2, 3, 4])


@pytest.fixture(autouse=True, params=[True, False], ids=["within reach", "out of reach"])
def reach(request, monkeypatch):
    monkeypatch.setattr(LATE, "has_signals", True)
    monkeypatch.setattr(LATE, "has_reach", request.param)
    return request.param


ordered = pytest.mark.usefixtures("no_races")


@pytest.fixture
def copies(monkeypatch):
    """Return a function that counts the copies to and from the host since its last call."""
    counts_ = []
    copy = LATE.copy

    def counting(target, source):
        if isinstance(target, np.ndarray) or isinstance(source, np.ndarray):
            counts_.append(target.nbytes)
        copy(target, source)

    monkeypatch.setattr(LATE, "copy", counting)
    return counts_


def run(size, function, **options):
    """Run it on ranks that are threads, each with a stream of its own: else they would wait for each other's calls."""

    def check(comm):
        with LATE.using(LATE.stream()):
            return function(comm)

    return loopback.run(size, check, **options)


def filled(comm, count, symmetric, add=0):
    x = comm.empty((count,), "float32", device=LATE) if symmetric else LATE.empty((count,))
    LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + 1 + add)
    return x


def total(size):
    return size * (size + 1) / 2


@ordered
@ranks
def test_reductions_match_numpy(size):
    def check(comm):
        there = OnDevice(comm)
        for dtype, op in REDUCIBLE[size::19]:
            for shape in SIZES:
                checks.all_reduce(there, dtype, shape, op)
            checks.reduce(there, dtype, (70_001,), op, root=size - 1)
            checks.reduce_scatter(there, dtype, (30_000, 3), op)

    run(size, check, config=CONFIG)


@ordered
@ranks
def test_movement_matches_numpy(size):
    def check(comm):
        there = OnDevice(comm)
        for dtype in DTYPES[::4]:
            for shape in SIZES:
                checks.broadcast(there, dtype, shape, root=size - 1)
                checks.all_gather(there, dtype, shape)
                checks.gather(there, dtype, shape, root=size - 1)
            checks.all_to_all(there, dtype, (size, 30_000))
            checks.scatter(there, dtype, (30_000,), root=size - 1)

    run(size, check, config=CONFIG)


@ordered
@ranks
def test_scans_match_numpy(size, copies):
    """Each rank reads the data of lower ranks; also in place, where other ranks still read the overwritten array."""

    def check(comm):
        there = OnDevice(comm)
        for dtype, op in (("float32", "sum"), ("bfloat16", "prod"), ("int8", "max"), ("bool", "sum")):
            for shape in SIZES:
                checks.scan(there, dtype, shape, op)
        x = filled(comm, 100_000, symmetric=True)
        comm.barrier()
        copies.clear()
        comm.barrier()
        for verb, own in (("scan", 1), ("exscan", 0)):
            LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + 1)
            getattr(comm, verb)(x, out=x)
            comm.barrier()
            assert not copies
            comm.barrier()
            expected = total(comm.rank + own) if comm.rank + own else 1  # rank 0 has nothing before it
            np.testing.assert_array_equal(x.numpy(), np.full(100_000, expected, np.float32))
            copies.clear()
            comm.barrier()

    run(size, check, config=CONFIG)


@ordered
@ranks
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_uneven_rows_are_exchanged(size, known, symmetric, copies):
    """Few rows and many, none for some ranks; into a given array, and into a new one."""

    def check(comm):
        rank = comm.rank
        for scale in (1, 700):
            counts = np.array([[scale * ((a * b + a) % 4) for b in range(size)] for a in range(size)])
            rows, from_ranks = int(counts[rank].sum()), counts[:, rank]
            most = int(counts.sum(axis=1).max()) + 1
            whole = comm.empty((most, 30), "float32", device=LATE) if symmetric else LATE.empty((most, 30))
            mine = [np.arange(counts[r].sum() * 30, dtype=np.float32).reshape(-1, 30) + 1e5 * r for r in range(size)]
            x = whole[:rows]
            LATE.copy(LATE.wrap(x, "x"), LATE.wrap(LATE.put(mine[rank]), "mine"))
            starts = counts.cumsum(axis=1) - counts
            expected = np.concatenate([mine[r][starts[r, rank] :][: counts[r, rank]] for r in range(size)])
            takes = from_ranks.tolist() if known else None
            LATE.synchronise()
            comm.barrier()
            copies.clear()
            comm.barrier()
            for out in (None, LATE.empty((int(from_ranks.sum()), 30))):
                result, received = comm.all_to_all_v(x, counts[rank].tolist(), takes=takes, out=out)
                assert received.tolist() == from_ranks.tolist() and (out is None or result is out)
                comm.barrier()
                assert not copies
                comm.barrier()
                np.testing.assert_array_equal(result.numpy(), expected)
                copies.clear()
                comm.barrier()

    run(size, check, config=CONFIG)


def test_a_wrong_row_count_raises_on_its_rank_only():
    """Only the rank with wrong counts raises; the others get their rows, and the group stays usable."""

    def check(comm):
        x = LATE.put(np.full((6, 2), comm.rank, np.float32))
        takes = [2, 2, 2] if comm.rank else [2, 1, 2]
        if comm.rank:
            result, _ = comm.all_to_all_v(x, [2, 2, 2], takes=takes)
            np.testing.assert_array_equal(result.numpy()[:, 0], [0, 0, 1, 1, 2, 2])
        else:
            with pytest.raises(MismatchError, match="rank 1 sent 2 rows to rank 0, which expected 1"):
                comm.all_to_all_v(x, [2, 2, 2], takes=takes)
        for room in (5, 6):
            out = LATE.empty((room if comm.rank == 1 else 6, 2))
            if room == 5 and comm.rank == 1:
                with pytest.raises(UsageError, match=r"rank 1 received 6 rows.*out has 5"):
                    comm.all_to_all_v(x, [2, 2, 2], out=out)
            else:
                np.testing.assert_array_equal(
                    comm.all_to_all_v(x, [2, 2, 2], out=out)[0].numpy()[:, 0], [0, 0, 1, 1, 2, 2]
                )

    run(3, check, config=CONFIG)


LAYOUTS = ([0, 0, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 2, 2])


@ordered
@pytest.mark.parametrize("devices", [(), ("late",)], ids=["staged", "direct"])
@pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))
def test_all_reduce_between_nodes(nodes, devices, copies, reach):
    """Each share crosses the network once: with messages from device memory nothing goes through the host.

    Devices of a node that are out of each other's reach leave that to the host.
    """

    def check(comm):
        there = OnDevice(comm)
        for dtype, op in [
            ("float32", "sum"),
            ("bfloat16", "mean"),
            ("int8", "mean"),
            ("bool", "max"),
            ("float16", "min"),
        ]:
            for shape in SIZES:
                checks.all_reduce(there, dtype, shape, op)
        checks.all_reduce(there, "float32", (70_001,), "sum", "hierarchical")
        x = filled(comm, 70_001, symmetric=False)
        LATE.synchronise()
        comm.barrier()
        copies.clear()
        comm.barrier()
        comm.all_reduce(x, out=x)
        comm.barrier()
        copied = sum(copies)
        comm.barrier()
        assert (x.numpy() == total(len(nodes))).all()
        return copied

    rails = min(nodes.count(node) for node in nodes)
    on_rails = rails * len(set(nodes))
    for copied in run(len(nodes), check, nodes=nodes, config=CONFIG, devices=devices):
        # Out and in again: one array's bytes on each node, not one on each rank.
        times = on_rails // rails if reach else len(nodes)
        assert copied == (0 if devices else 2 * 4 * 70_001 * times)


def test_nodes_with_one_rank_go_through_the_host(copies):
    run(3, lambda comm: comm.all_reduce(filled(comm, 1000, False)), nodes=[0, 0, 1], config=CONFIG)
    assert copies


@ordered
def test_async_twins_match():
    run(3, lambda comm: checks.every_verb(OnDevice(checks.Twins(comm))), config=CONFIG)


@ordered
@ranks
@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("symmetric", [False, True])
def test_nothing_goes_through_the_host(size, count, symmetric, copies):
    def check(comm):
        x = filled(comm, count, symmetric)
        comm.barrier()
        copies.clear()
        comm.barrier()
        for step in range(3):
            comm.all_reduce(x, "mean", out=x)
            LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + 1 + step)
        comm.all_reduce(x, out=x, algorithm="node")
        comm.barrier()
        assert not copies
        np.testing.assert_array_equal(x.numpy(), np.full(count, total(size) + 2 * size, np.float32))

    run(size, check, config=CONFIG)


@ordered
@ranks
def test_symmetric_arrays_are_exchanged(size):
    """Large ones are read in place."""
    rows = 20_000

    def check(comm):
        x = comm.empty((size * rows,), "float32", device=LATE)
        everyone = [np.arange(size * rows, dtype=np.float32) + 1000 * rank for rank in range(size)]
        LATE.copy(LATE.wrap(x, "x"), LATE.wrap(LATE.put(everyone[comm.rank]), "mine"))
        part = slice(comm.rank * rows, (comm.rank + 1) * rows)
        np.testing.assert_array_equal(comm.reduce_scatter(x).numpy(), np.sum(everyone, axis=0)[part])
        np.testing.assert_array_equal(comm.all_to_all(x).numpy(), np.concatenate([each[part] for each in everyone]))
        np.testing.assert_array_equal(comm.all_gather(x).numpy(), np.concatenate(everyone))
        comm.all_gather(x[part], out=x)
        own = [each[rank * rows : (rank + 1) * rows] for rank, each in enumerate(everyone)]
        np.testing.assert_array_equal(x.numpy(), np.concatenate(own))
        comm.broadcast(x, root=size - 1)

    run(size, check, config=CONFIG)


@ordered
@ranks
def test_arrays_at_different_offsets_are_handled(size):
    """One rank's array is at another offset: all ranks see that, and the result is right."""

    def check(comm):
        shared = filled(comm, 50_000, symmetric=True)
        other = filled(comm, 50_000, symmetric=True)
        for odd in ("ordinary", "another"):
            x = shared
            if comm.rank == size - 1:
                x = other if odd == "another" else filled(comm, 50_000, symmetric=False)
            np.testing.assert_array_equal(comm.all_reduce(x).numpy(), np.full(50_000, total(size), np.float32))
        np.testing.assert_array_equal(comm.all_reduce(shared).numpy(), np.full(50_000, total(size), np.float32))

    run(size, check, config=CONFIG)


@ordered
def test_results_may_be_read_and_sources_written_at_once():
    """A fast rank disturbs neither a rank that still reads nor a rank that is far behind."""

    def check(comm):
        ordinary, shared = filled(comm, 40_000, symmetric=False), filled(comm, 40_000, symmetric=True)
        for step in range(8):
            for x in (ordinary, shared):
                LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + step)
                y = comm.all_reduce(x)
                LATE.kernels.fill(LATE.wrap(x, "x"), 99)
                if comm.rank == step % 3:
                    np.testing.assert_array_equal(y.numpy(), np.full(40_000, 3 + 3 * step, np.float32))

    run(3, check, config=CONFIG)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_missing_barrier_is_detected(symmetric, monkeypatch):
    meet_all, meetings = DeviceBoard.barrier, []

    def check(comm):
        x, right = filled(comm, 40_000, symmetric), True
        comm.all_reduce(x)  # creates the board
        for step in range(5):
            if comm.rank:
                LATE.kernels.fill(LATE.wrap(filled(comm, 40_000, False), "slower"), 0)
            LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + 1 + step)
            right &= bool((comm.all_reduce(x).numpy() == total(2) + 2 * step).all())
            comm.barrier()
        return right

    def only_the_first(board):
        if board not in meetings:
            meet_all(board)
        meetings.append(board)

    races = LATE.races
    assert all(run(2, check, config=CONFIG)) and LATE.races == races
    monkeypatch.setattr(DeviceBoard, "barrier", only_the_first)
    assert not all(run(2, check, config=CONFIG)) or LATE.races > races


def test_one_rank_without_peer_access_sends_all_through_the_host(monkeypatch, caplog):
    """All ranks go through the host then, and one of them logs it, once."""
    signals = LATE.signals
    boards = []

    def refused_once(memory, send_text, receive_text):
        boards.append(memory)
        if len(boards) == 1:
            raise TransportError("no such thing here")
        return signals(memory, send_text, receive_text)

    monkeypatch.setattr(LATE, "signals", refused_once)

    def check(comm):
        checks.every_verb(OnDevice(comm))

    run(3, check, config=CONFIG)
    assert len(boards) == 3
    notices = [record for record in caplog.records if "go through the host" in record.message]
    assert len(notices) == 1 and "no such thing here" in notices[0].message


def test_streams_that_block_each_other_are_detected(monkeypatch, caplog):
    """Streams are tried when the board is created."""
    monkeypatch.setattr("commlib.node.device_board.FIRST_BARRIER_TIMEOUT", 0.3)
    monkeypatch.setattr("tests.late.signals.write", lambda words, number: None)
    run(2, lambda comm: checks.all_reduce(OnDevice(comm), "float32", (100,), "sum"), config=CONFIG)
    assert "its stream did not reach the others" in caplog.text


def test_device_paths_can_be_switched_off(copies):
    def check(comm):
        comm.all_reduce(filled(comm, 1000, symmetric=False))

    run(2, check, config=replace(CONFIG, device_peers=False))
    assert copies


def test_mismatches_raise_before_anything_is_queued():
    def check(comm):
        x = filled(comm, 1000, symmetric=False)
        comm.all_reduce(x)
        with pytest.raises(MismatchError, match="1001 x float32"):
            comm.all_reduce(x if comm.rank else filled(comm, 1001, symmetric=False))
        np.testing.assert_array_equal(comm.all_reduce(x).numpy(), np.full(1000, 3.0))  # in step again

    run(2, check, config=CONFIG)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_that_is_dropped_is_freed(peers, symmetric):
    def check(comm):
        part = comm.split(0)
        part.all_reduce(filled(part, 100_000, symmetric)).numpy()
        part.all_reduce_async(filled(part, 10, symmetric)).wait().numpy()
        group = weakref.ref(part.group)
        comm.barrier()
        del part
        deadline = time.monotonic() + 5  # another thread may still be on its way out of it
        while group() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        return group() is None

    assert run(2, check, config=replace(CONFIG, device_peers=peers)) == [True, True]


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_missing_rank_does_not_block_streams_for_ever(end, monkeypatch, caplog):
    """Without a synchronisation of hosts a stream waits; closing or leaving the group releases it."""
    monkeypatch.setattr("commlib.collectives.device.staging_queue.LAST", 0.3)

    def check(comm):
        x = filled(comm, 1000, symmetric=False)
        comm.all_reduce(x)
        x.numpy()
        comm.barrier()
        if comm.rank == 0:
            comm.all_reduce(x)
            assert not LATE.current().record().done()
            comm.close() if end == "close" else comm.group.leave()
            x.numpy()

    run(2, check, config=replace(CONFIG, check="never"))
    assert "late has queued work left after 0.3 s" in caplog.text


def test_a_failed_rank_releases_the_others():
    def check(comm):
        x = filled(comm, 1000, symmetric=False)
        comm.all_reduce(x)
        if comm.rank == 1:
            comm.group.abandon("a call", ValueError("on the way"))
            return
        with pytest.raises(PeerError, match="rank 1"):
            for _ in range(2):
                comm.all_reduce(x)
        x.numpy()  # its stream does not wait any more

    run(2, check, config=CONFIG)
