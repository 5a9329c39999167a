"""Recording captures real operations, on ranks that are threads, and nothing while it is off."""

from __future__ import annotations

import ctypes
import json
import logging
import re
import threading
import time

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.coordinator import Coordinator, OpRequest
from commlib.errors import MismatchError, ShutdownError, StallError, UsageError
from commlib.observe.recorder import Phase
from commlib.runtime.compiled_call import CompiledCall, Plan
from commlib.runtime.process import Runtime
from commlib.runtime.progress import RECORDED, Progress
from commlib.runtime.recording import Recording
from tests.bodies.every_verb import calls, check_one_call, phases
from tests.bodies.loopback import run

LAYOUTS = [([0], "alone"), ([0, 0], "node"), ([0, 1], "network"), ([0, 0, 1, 1], "hierarchical")]
layouts = pytest.mark.parametrize("nodes", [nodes for nodes, _ in LAYOUTS], ids=[name for _, name in LAYOUTS])


@layouts
def test_every_verb_is_recorded_in_every_form(nodes):
    def work(comm):
        recording = comm.runtime.recording
        for verb, way, call in calls(comm):
            number = comm.group.call_number + 1
            recording.start(10_000)
            call()
            recording.stop()
            seen = recording.events()
            check_one_call(comm, seen, verb, way, number)
            assert comm.stats()[verb].calls == 1
            call()
            assert recording.events() == seen

    run(len(nodes), work, nodes=nodes, config=Config(timeout=20))


def test_rounds_are_recorded_where_messages_are_sent():
    def work(comm):
        comm.runtime.recording.start(10_000)
        comm.all_reduce(np.ones(3, np.float32))  # persistent messages
        comm.all_reduce(np.ones(1 << 18, np.float32), algorithm="ring")
        comm.runtime.recording.stop()
        operations_ = phases(comm.runtime.recording.events())
        return [sum(phase is Phase.ROUND for phase in seen) for seen in operations_.values()]

    for small, large in run(2, work, nodes=[0, 1]):
        assert small >= 1 and large >= 2


def test_a_wait_on_a_node_is_a_round():
    def work(comm):
        comm.all_reduce(np.ones(3, np.float32))  # its kernel is loaded, which may take longer than rank 1 sleeps
        comm.runtime.recording.start()
        if comm.rank == 1:
            time.sleep(0.3)
        comm.all_reduce(np.ones(3, np.float32))
        (seen,) = phases(comm.runtime.recording.events()).values()
        return seen

    assert Phase.ROUND in run(2, work)[0]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_messages_between_two_ranks_are_recorded(nodes):
    def work(comm):
        other, x, out = 1 - comm.rank, np.ones(5, np.float32), np.empty(5, np.float32)
        comm.barrier()
        comm.runtime.recording.start()
        if comm.rank == 0:
            comm.send(x, other)
            comm.recv(out, other)
        else:
            comm.recv(out, other)
            comm.send(x, other)
        works = [comm.recv_async(out, other, 3), comm.send_async(x, other, 3)]
        for message in works:
            message.wait()
        comm.send_recv(x, other, out, other)
        operations_ = phases(comm.runtime.recording.events())
        assert sorted(record.verb for record in operations_) == ["recv", "recv", "send", "send", "send_recv"]
        assert all(seen == [Phase.RUN, Phase.END] for seen in operations_.values()), operations_
        assert {(record.group, record.sequence, record.nbytes) for record in operations_} == {("world", 0, 20)}

    run(2, work, nodes=nodes)


def test_the_last_event_has_the_error():
    def work(comm):
        comm.barrier()
        comm.runtime.recording.start()
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(3 + comm.rank, np.float32))
        with pytest.raises(MismatchError):
            comm.all_reduce_async(np.ones(5 + comm.rank, np.float32)).wait()
        with pytest.raises(MismatchError):
            if comm.rank:
                comm.send(np.ones(3), 0)
                raise MismatchError("that of the other rank")
            comm.recv(np.ones(2), 1)
        with pytest.raises(UsageError):
            comm.all_reduce(np.ones(3), "no such operation")  # it begins no operation
        comm.barrier()
        ends = [event for event in comm.runtime.recording.events() if event.phase is Phase.END]
        assert [bool(event.detail) for event in ends] == [True, True, comm.rank == 0, False], ends
        assert all(event.detail.startswith("MismatchError: ") for event in ends if event.detail)
        assert comm.stats()["all_reduce"].failed == 2

    run(2, work)


def test_operations_dropped_from_the_queue_end():
    def work(comm):
        comm.runtime.recording.start()
        began, opened = threading.Event(), threading.Event()

        def gate():
            began.set()
            return opened.wait(10)

        blocked = comm.group.progress.start("gate", gate)
        assert began.wait(10)
        dropped = comm.barrier_async()
        comm.group.progress.close()
        opened.set()
        blocked.wait(10)
        with pytest.raises(ShutdownError):
            dropped.wait(10)
        return phases(comm.runtime.recording.events())

    (operations_,) = run(1, work)
    ((first, ran), (barrier, never)) = operations_.items()
    assert (first.verb, ran, first.error) == ("gate", [Phase.QUEUED, Phase.RUN, Phase.END], "")
    assert (barrier.verb, never) == ("barrier", [Phase.QUEUED, Phase.END]) and "ShutdownError" in barrier.error


def test_numbers_follow_the_order_of_a_group():
    def work(comm):
        group = comm.split(0, name="second")
        comm.runtime.recording.start(10_000)
        works = []
        for number in range(30):
            works += [comm.all_reduce_async(np.ones(number + 1)), group.broadcast_async(np.ones(3000))]
        for each in works:
            each.wait()
        for name in ("world", "second"):
            ends = [e for e in comm.runtime.recording.events() if e.group == name and e.phase is Phase.END]
            numbers = [event.sequence for event in ends]
            assert len(numbers) == 30 and numbers == list(range(numbers[0], numbers[0] + 30))

    run(2, work)


def test_recording_can_start_and_stop_during_operations(tmp_path):
    """Every operation that is recorded has its end, however often recording and a timeline are started meanwhile."""

    def work(comm):
        recording, ready = comm.runtime.recording, threading.Event()
        recorders, paths = [], []

        def toggle():
            number = 0
            while not ready.is_set():
                number += 1
                recording.start(100_000)
                recorders.append(recording.recorder)
                if number % 2:
                    paths.append(tmp_path / f"{comm.rank}-{number}.json")
                    recording.start_timeline(str(tmp_path / "{rank}-") + f"{number}.json", comm.rank)
                time.sleep(0.002)
                recording.stop()
                time.sleep(0.001)
                recording.stop_timeline()

        thread = threading.Thread(target=toggle)
        thread.start()
        x, out = np.ones(3, np.float32), np.empty(3, np.float32)
        deadline, stop = time.monotonic() + 1.0, np.zeros(1)
        calls = 0
        while not stop[0]:
            started = [comm.all_reduce_async(x, out=out), comm.all_gather_async(x)]
            comm.all_reduce(x, out=x)
            x[:] = 1
            for each in started:
                each.wait()
            stop = comm.all_reduce(np.array([float(time.monotonic() > deadline)]), "max")
            calls += 4
        ready.set()
        thread.join()
        seen = 0
        for recorder in recorders:
            operations_ = phases(recorder.events())
            seen += len(operations_)
            assert all(each[-1] is Phase.END and each.count(Phase.END) == 1 for each in operations_.values())
        assert 0 < seen <= calls
        for path in paths:
            json.loads(path.read_text())
        assert not comm.group.progress.pending and comm.group.progress.journal.recorder is None

    run(2, work)


class Counted(CompiledCall):
    """A call that a compiled step could run as a whole."""

    __slots__ = ("performed", "stepped")

    def __init__(self, progress):
        super().__init__(progress, "counted")
        self.stepped = self.performed = 0
        self.can_begin = True

        def step(address, x, target):
            self.stepped += 1
            return 0

        self._step = step

    def perform(self, x, target):
        self.performed += 1
        return target

    def begin(self, x, target):
        self.stepped += 1
        return True


def test_without_recording_a_call_is_its_step_alone():
    """Calls take no other path and leave no counts or events, also after recording was on."""
    runtime, progress = Runtime(), Progress()
    runtime.recording.add(progress)
    call, x = Counted(progress), np.ones(1)
    planned = []

    def step(address):
        planned.append(address)
        return 0

    kernel = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(step)
    plan = Plan(call, x, x, x, None, ctypes.cast(kernel, ctypes.c_void_p).value or 0)

    def call_thrice():
        call.stepped = call.performed = 0
        planned.clear()
        assert call.now(x, x) is plan() is call.start(x, x, value=x).wait() is x
        return call.stepped, call.performed, len(planned)

    assert call_thrice() == (2, 0, 1) and progress.pending == 0
    runtime.recording.start()
    assert progress.pending == RECORDED
    assert call_thrice() == (1, 2, 0)
    operations_ = phases(runtime.recording.events())
    assert list(operations_.values()) == [[Phase.RUN, Phase.END]] * 2 + [[Phase.BEGUN, Phase.END]]
    runtime.recording.stop()
    assert call_thrice() == (2, 0, 1) and progress.pending == 0
    assert len(phases(runtime.recording.events())) == 3
    progress.close()


def test_without_recording_there_are_no_events():
    def work(comm):
        for _, _, call in calls(comm):
            call()
        assert comm.runtime.recording.events() == []
        with pytest.raises(UsageError, match="COMMLIB_EVENTS"):
            comm.stats()

    run(2, work)


def test_with_recording_a_blocking_call_runs_in_its_callers_thread():
    def work(comm):
        comm.runtime.recording.start()
        comm.all_reduce(np.ones(1))
        comm.barrier()
        return {event.thread for event in comm.runtime.recording.events()} == {threading.get_ident()}

    assert run(2, work) == [True, True]


def test_recording_may_be_started_twice():
    recording = Recording()
    recording.start(3)
    with pytest.raises(UsageError, match="stop_recording first"):
        recording.start()
    recording.stop()
    with pytest.raises(UsageError, match="at least 1"):
        recording.start(0)
    recording.start()
    recording.close()


def test_a_timeline_restores_recording(tmp_path):
    for was_on in (False, True):
        recording = Recording()
        if was_on:
            recording.start()
        recording.start_timeline(str(tmp_path / "a{rank}.json"), 2)
        assert recording.recorder is not None
        with pytest.raises(UsageError, match="timeline: one is being written already: end its `with` block"):
            recording.start_timeline(str(tmp_path / "b.json"), 0)
        recording.stop_timeline()
        assert (recording.recorder is not None) == was_on and (tmp_path / "a2.json").exists()
        recording.start_timeline(str(tmp_path / "c.json"), 1)  # rank 0's
        assert recording.timeline is None and not (tmp_path / "c.json").exists()
        recording.close()
        assert recording.recorder is None


def test_every_operation_is_in_the_timeline(tmp_path):
    def work(comm):
        comm.runtime.recording.start_timeline(str(tmp_path / "{rank}.json"), comm.rank)
        expected = []
        for verb, _, call in calls(comm):
            call()
            expected.append((verb, comm.group.call_number))
        comm.runtime.recording.stop_timeline()
        comm.barrier()  # not in it
        events = json.loads((tmp_path / f"{comm.rank}.json").read_text())
        begun = [event for event in events if event["ph"] == "B" and event["args"]["group"] == "world"]
        assert [(event["name"], event["args"]["sequence"]) for event in begun] == expected
        row = begun[0]["tid"]
        assert sum(event["ph"] == "E" and event["tid"] == row for event in events) == len(expected)

    run(2, work)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_a_stall_names_the_last_operation(nodes, caplog):
    caplog.set_level(logging.WARNING, "commlib")

    def work(comm):
        comm.all_gather(np.ones(2))
        comm.runtime.recording.start()
        comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            time.sleep(1.5)
            return ""
        with pytest.raises(StallError) as caught:
            comm.barrier()
        return str(caught.value)

    notices, _ = run(2, work, nodes=nodes, config=Config(timeout=1.0, stall_warning=0.4))
    for text in (notices, caplog.text):
        _, operations_, last = text.partition("; last on this rank: all_reduce of 3 x float64")
        assert operations_ and "(call 2) ended" in last and "barrier (call 3) " in last, text
        assert "all_gather" not in last


def test_a_late_message_names_the_last_operation():
    def work(comm):
        comm.runtime.recording.start()
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(StallError, match=r"; last on this rank: barrier .* recv from rank 1, tag 7 begun 0"):
                comm.recv(np.ones(1), 1, 7)

    run(2, work, config=Config(timeout=0.7))  # enough for the barrier on a busy machine


def test_without_recording_the_text_of_a_stall_is_unchanged():
    def work(comm):
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(StallError, match=r"look at what the late ranks are doing$"):
                comm.recv(np.ones(1), 1, 7)

    run(2, work, config=Config(timeout=1.5))


def test_an_overdue_named_operation_names_the_last_operation(caplog):
    caplog.set_level(logging.WARNING, "commlib")

    def ask(coordinator, name):
        array = np.ones(3, np.float32)
        request = OpRequest("allreduce", name, (("float32", (3,)),), (("op", "sum"),))
        return coordinator.submit(request, [array], [array])

    together = threading.Barrier(2)

    def work(comm):
        comm.runtime.recording.start()
        coordinator = Coordinator(comm, range(comm.size))
        try:
            ask(coordinator, "first").wait()
            if comm.rank == 0:
                with pytest.raises(StallError, match=pattern):
                    ask(coordinator, "late").wait()
            else:
                time.sleep(0.3)  # otherwise its own limit might expire first, on a loaded machine
                ask(coordinator, "other").exception()
            together.wait(20)  # no call of the group: the ranks may time out at different times
        finally:
            coordinator.close()

    pattern = r"; last on this rank: first: allreduce \(call 1\) ended .*late: allreduce queued 0"
    run(2, work, config=Config(timeout=0.8, stall_warning=0.3))
    assert re.search(pattern, caplog.text)
