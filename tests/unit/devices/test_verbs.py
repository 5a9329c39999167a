"""Every verb on arrays of a late device: blocking, asynchronous and planned, on one node and on several."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from commlib.collectives.device.staging_queue import StagingQueue
from commlib.config.settings import Config
from commlib.dtypes import DTYPES, kernel_operation
from commlib.errors import MismatchError, StallError, UsageError
from commlib.kernels.host.reduce import reduce_function
from commlib.runtime.work import DeviceWork
from commlib.schedule import algorithms
from tests.bodies import checks
from tests.bodies.loopback import run
from tests.late import LATE, LateArray, OnDevice
from tests.late.stream import LateStream
from tests.oracles.oracle import REDUCIBLE, combined, values

LAYOUTS = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 1], [0, 0, 1], [0, 0, 1, 1]]
CONFIG = Config(timeout=20, slot_kib=1, staging_kib=1)  # arrays above 1 KiB go in pieces

layouts = pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    for dtype, op in REDUCIBLE:
        reduce_function(dtype, kernel_operation(dtype, op))


@pytest.fixture
def slowly(monkeypatch):
    monkeypatch.setattr(LATE, "delay", 0.1)


# Through host memory, and by messages of the device's own memory.
ways = pytest.mark.parametrize("devices", [(), ("late",)], ids=["staged", "direct"])


def spread(nodes, function, devices=()):
    before, races = LATE.queued, LATE.races
    run(len(nodes), lambda comm: function(OnDevice(comm)), nodes=nodes, config=CONFIG, devices=devices)
    assert LATE.queued > before and LATE.races == races


@ways
@layouts
def test_reductions_match_numpy(nodes, devices):
    def check(comm):
        for dtype, op in [("float32", "sum"), ("bfloat16", "mean"), ("bool", "max"), ("int8", "prod")]:
            for shape in ((), (0,), (3, 4), (3000,)):
                checks.all_reduce(comm, dtype, shape, op)
                checks.reduce(comm, dtype, shape, op, root=comm.size - 1)
                if op != "mean":
                    checks.scan(comm, dtype, shape, op)
            checks.reduce_scatter(comm, dtype, (7, 3), op)

    spread(nodes, check, devices)


@ways
@layouts
def test_movement_matches_numpy(nodes, devices):
    def check(comm):
        size = comm.size
        for dtype in ("float32", "bfloat16", "bool"):
            for shape in ((4, 3), (900, 2)):
                checks.broadcast(comm, dtype, shape, root=size - 1)
                checks.all_gather(comm, dtype, shape)
                checks.gather(comm, dtype, shape, root=size - 1)
                checks.scatter(comm, dtype, shape, root=size - 1)
                checks.all_to_all(comm, dtype, shape)
                checks.send_recv(comm, dtype, shape)
                checks.send_and_recv(comm, dtype, shape, tag=7)
            checks.all_gather_v(comm, dtype, list(range(size)), (2,))
            checks.all_to_all_v(comm, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))

    spread(nodes, check, devices)


@ways
def test_every_dtype_matches_numpy(devices):
    def check(comm):
        for dtype, op in REDUCIBLE:
            checks.all_reduce(comm, dtype, (5,), op)
        for dtype in DTYPES:
            checks.all_gather(comm, dtype, (3,))

    spread([0, 0], check, devices)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "node"])
def test_algorithms_can_be_named(algorithm):
    def check(comm):
        checks.all_reduce(comm, "float32", (3000,), "sum", algorithm)

    spread([0, 0, 0], check)


@ways
@layouts
def test_async_twins_match(nodes, devices):
    body = lambda comm: checks.every_verb(OnDevice(checks.Twins(comm)))  # noqa: E731
    run(len(nodes), body, nodes=nodes, config=CONFIG, devices=devices)


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_schedules_run_on_device_memory(verb):
    def check(comm):
        for algorithm in algorithms(verb):
            getattr(checks, verb)(comm, "float32", (600,), algorithm=algorithm)

    spread([0, 0, 1], check, ("late",))


def test_a_message_without_a_wait_for_the_device_is_detected(monkeypatch, slowly):
    def check(comm):
        checks.all_reduce(OnDevice(comm), "float32", (600,), "sum", "ring")

    run(2, check, config=CONFIG, devices=("late",))
    monkeypatch.setattr("commlib.execution.streaming.wait_for", lambda event, on_wait: None)
    with pytest.raises(AssertionError):
        run(2, check, config=CONFIG, devices=("late",))


@ways
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1, 1]])
def test_plans_match_their_verbs(nodes, devices):
    def check(comm):
        xs = [values("float32", (700,), rank) for rank in range(comm.size)]
        x, out, home = LATE.put(xs[comm.rank]), LATE.empty((700,)), LATE.empty((700,))
        plans = [comm.plan_all_reduce(x, out=out), comm.plan_broadcast(home, root=comm.size - 1)]
        for step in range(3):
            LATE.copy(LATE.wrap(home, "x"), LATE.wrap(x, "x"))
            assert plans[0]() is out
            assert plans[1].start().wait() is home
            np.testing.assert_array_equal(out.numpy(), combined(xs, "sum") * (1 << step))
            np.testing.assert_array_equal(home.numpy(), xs[-1] * (1 << step))
            LATE.kernels.scale(LATE.wrap(x, "x"), 2)

    run(len(nodes), check, nodes=nodes, config=CONFIG, devices=devices)


def test_a_work_reports_a_free_host_and_a_ready_result(slowly):
    def check(comm):
        x = LATE.put(np.full(10, comm.rank + 1.0))
        work = comm.all_reduce_async(x, out=x)
        assert isinstance(work, DeviceWork)
        assert work.wait() is x and work.done()
        np.testing.assert_array_equal(x.numpy(), np.full(10, 3.0))  # this thread's stream is behind it
        work = comm.all_reduce_async(x, out=x)
        assert work.wait(host=True) is x
        np.testing.assert_array_equal(x.peek(), np.full(10, 6.0))

    run(2, check, config=CONFIG)


def test_blocking_calls_do_not_wait_for_the_last_copy(slowly):
    def check(comm):
        x = LATE.put(np.ones(4))
        comm.all_reduce(x, out=x)
        LATE.synchronise()
        started = time.perf_counter()
        comm.all_reduce(x, out=x)
        returned = time.perf_counter() - started
        x.numpy()
        return returned, time.perf_counter() - started

    for returned, whole in run(2, check, config=CONFIG):
        assert whole > 1.8 * LATE.delay and returned < whole - LATE.delay / 2


def test_calls_follow_the_order_of_their_streams_and_threads():
    def check(comm):
        stream = LATE.stream()
        with LATE.using(stream):
            x = LATE.put(np.full(2000, comm.rank + 1.0))
            work = comm.all_reduce_async(x, out=x)
        result = work.wait()  # now the default stream of this thread waits
        np.testing.assert_array_equal(result.numpy(), np.full(2000, 3.0))

    run(2, check, config=CONFIG)


def test_a_result_without_a_waiter_disturbs_nothing():
    def check(comm):
        for _ in range(5):
            comm.all_reduce_async(LATE.put(np.ones(700)))
        x = LATE.put(np.ones(700))
        np.testing.assert_array_equal(comm.all_reduce(x).numpy(), np.full(700, 2.0))

    run(2, check, config=CONFIG)


@ways
def test_results_use_memory_of_the_callers_stream(slowly, devices):
    """Memory released while queued work read it was reused, because it belonged to another stream."""

    def check(comm):
        with LATE.using(LATE.stream()):
            gathered = comm.all_gather_v(LATE.put(np.full(50, comm.rank + 1.0)))
            freed_early = LATE.empty((100,), "float64")
            LATE.copy(LATE.wrap(freed_early, "kept"), LATE.wrap(gathered, "gathered"))
            del gathered
            comm.all_gather_v(LATE.put(np.ones(50)))
            np.testing.assert_array_equal(freed_early.numpy(), np.repeat([1.0, 2.0], 50))

    run(2, check, config=CONFIG, devices=devices)


def reduce_once(comm):
    x = LATE.put(np.full(10, comm.rank + 1.0))
    np.testing.assert_array_equal(comm.all_reduce(x).numpy(), np.full(10, 3.0))


def test_a_missing_wait_of_the_host_is_detected(monkeypatch, slowly):
    run(2, reduce_once, config=CONFIG)
    monkeypatch.setattr(StagingQueue, "wait", lambda queue, event: None)
    with pytest.raises(AssertionError):
        run(2, reduce_once, config=CONFIG)


def test_a_missing_wait_for_the_callers_stream_is_detected(monkeypatch, slowly):
    plain = StagingQueue.run

    def hasty(self, text, run, x, ready, target):
        return plain(self, text, run, x, self.device.stream().record(), target)

    monkeypatch.setattr(StagingQueue, "run", hasty)
    with pytest.raises(AssertionError):
        run(2, reduce_once, config=CONFIG)


def test_a_missing_wait_for_the_result_is_detected(monkeypatch, slowly):
    plain = StagingQueue.run

    def hasty(self, text, run, x, ready, target):
        value, _ = plain(self, text, run, x, ready, target)
        return value, self.device.stream().record()

    monkeypatch.setattr(StagingQueue, "run", hasty)
    with pytest.raises(AssertionError):
        run(2, reduce_once, config=CONFIG)


def test_host_and_device_do_not_mix():
    def check(comm):
        late, here = LATE.put(np.ones(3)), np.ones(3)
        for x, out in ((late, here), (here, late)):
            with pytest.raises(UsageError, match="pass arrays on one device"):
                comm.all_reduce(x, out=out)
        with pytest.raises(UsageError, match=r"out has shape \(2,\)"):
            comm.all_reduce(late, out=LATE.empty((2,), "float64"))

    run(2, check, config=CONFIG)


def test_arrays_on_different_devices_are_an_error():
    def check(comm):
        x = np.ones(3, np.float32)
        with pytest.raises(MismatchError, match="device=late"):
            comm.all_reduce(LATE.put(x) if comm.rank else x)

    run(2, check, config=CONFIG)


def test_a_length_mismatch_names_the_whole_length():
    def check(comm):
        with pytest.raises(MismatchError, match="a piece of 1000"):
            comm.all_reduce(LATE.put(np.ones(1000 if comm.rank else 2000, np.float32)))

    run(2, check, config=replace(CONFIG, device_peers=False))


class StuckEvent:
    """An event that never happens."""

    def done(self):
        return False

    def block(self):
        pass


class SilentStream(LateStream):
    """A stream that runs its work, and records events as long as it is not stuck."""

    stuck = False

    def record(self, event=None):
        event = super().record()
        return StuckEvent() if self.stuck else event


def test_a_stuck_device_times_out(monkeypatch, caplog):
    monkeypatch.setattr("commlib.collectives.device.staging_queue.LAST", 0.2)
    stream = SilentStream()
    monkeypatch.setattr(LATE, "stream", lambda: stream)

    def check(comm):
        x = LATE.put(np.ones(3))
        comm.all_reduce(x)
        stream.stuck = True
        with pytest.raises(StallError, match="copies to and from late"):
            comm.all_reduce(x)
        comm.close()

    run(1, check, config=replace(CONFIG, timeout=0.5))
    assert "late has queued work left after 0.2 s" in caplog.text


def test_closing_waits_for_running_work(slowly):
    def check(comm):
        x = LATE.put(np.ones(3))
        comm.all_reduce(x, out=x)
        comm.close()
        np.testing.assert_array_equal(x.peek(), np.full(3, 2.0))

    run(2, check, config=CONFIG)


def test_arguments_stay_unchanged():
    def check(comm):
        x = LATE.put(np.ones((2, 3), np.float32))
        result = comm.all_reduce(x)
        assert isinstance(result, LateArray) and result.shape == (2, 3) and result.dtype == np.float32
        assert comm.all_reduce(x, out=x) is x
        received, counts = comm.all_to_all_v(x, [1] * comm.size)
        assert isinstance(received, LateArray) and isinstance(counts, np.ndarray)
        assert comm.gather(x, root=0) is None or comm.rank == 0

    run(2, check, config=CONFIG)


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 1]])
def test_devices_have_symmetric_memory(nodes):
    def check(comm):
        x = comm.empty((300, 2), "float32", device=LATE)
        assert isinstance(x, LateArray) and x.shape == (300, 2)
        np.testing.assert_array_equal(x.numpy(), np.zeros((300, 2), np.float32))
        LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + 1)
        expected = np.full((300, 2), sum(range(1, comm.size + 1)), np.float32)
        assert comm.all_reduce(x, out=x) is x
        np.testing.assert_array_equal(x.numpy(), expected)
        place = comm.group.symmetric_on(LATE).find(x.address, 2400)
        assert place is not None and len(place[1]) == len(comm.node().group.topology.nodes[0])
        comm.barrier()
        for base in place[1]:  # every rank of the node can address it
            shared = LATE.at(base, (300, 2), np.dtype("float32"), x)
            np.testing.assert_array_equal(shared.numpy(), expected)
        assert comm.empty((0,), "int8", device=LATE).shape == (0,)
        comm.barrier()

    run(len(nodes), check, nodes=nodes, config=CONFIG)
