"""The progress thread: launch order, inline runs, closing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest

from commlib.errors import ShutdownError, UsageError
from commlib.observe.journal import Journal
from commlib.runtime.compiled_call import Task
from commlib.runtime.progress import Progress


@pytest.fixture
def progress():
    created = Progress()
    yield created
    created.close()


def run_now(progress, text, function):
    """Run an operation in this thread, after all earlier operations."""
    return Task(progress, text, function).now(None, None)


class Gate:
    """An operation that runs until it is opened."""

    def __init__(self):
        self.began, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.began.set()
        assert self.opened.wait(10)


def test_operations_run_in_launch_order_off_the_callers_thread(progress):
    ran = []
    works = [progress.start(str(n), lambda n=n: ran.append((n, threading.current_thread()))) for n in range(100)]
    works[-1].wait(10)
    assert [n for n, _ in ran] == list(range(100))
    assert {thread.name for _, thread in ran} == {"commlib-progress"}


def test_a_blocking_call_runs_in_its_own_thread_when_nothing_is_pending(progress):
    assert run_now(progress, "inline", threading.current_thread) is threading.current_thread()
    progress.start("first", lambda: None).wait(10)
    assert run_now(progress, "inline", threading.current_thread) is threading.current_thread()


def test_a_blocking_call_queues_behind_pending_operations(progress):
    gate, ran = Gate(), []
    progress.start("gate", gate)
    progress.start("second", lambda: ran.append("second"))
    blocking = threading.Thread(target=lambda: run_now(progress, "third", lambda: ran.append("third")))
    blocking.start()
    time.sleep(0.05)
    assert ran == []
    gate.opened.set()
    blocking.join(10)
    assert ran == ["second", "third"]


def test_one_operation_runs_at_a_time_over_all_threads(progress):
    inside, most = [0], [0]

    def run():
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        inside[0] -= 1

    def use():
        for _ in range(15):
            run_now(progress, "blocking", run)
            progress.start("async", run)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert progress.drain(10) == ""
    assert most[0] == 1


def test_an_error_belongs_to_its_work_and_the_next_one_runs(progress):
    failing = progress.start("failing", lambda: 1 / 0)
    after = progress.start("after", lambda: 7)
    with pytest.raises(ZeroDivisionError):
        failing.wait(10)
    assert after.wait(10) == 7
    with pytest.raises(ZeroDivisionError):
        run_now(progress, "inline", lambda: 1 / 0)
    assert run_now(progress, "inline", lambda: 8) == 8


def test_close_drops_operations_that_have_not_begun(progress):
    gate = Gate()
    running, queued = progress.start("running", gate), progress.start("queued", lambda: None)
    assert gate.began.wait(10)
    progress.close()
    with pytest.raises(ShutdownError, match="queued: commlib was shut down before it started"):
        queued.wait(10)
    for call in (partial(run_now, progress), progress.start):
        with pytest.raises(ShutdownError, match="late: commlib has been shut down"):
            call("late", lambda: None)
    assert not running.done()
    gate.opened.set()
    assert running.wait(10) is None


def test_the_thread_ends_after_close():
    progress = Progress()
    progress.start("only", lambda: None).wait(10)
    thread = next(t for t in threading.enumerate() if t.name == "commlib-progress" and t is progress.thread)
    assert thread.daemon
    progress.close()
    thread.join(5)
    assert not thread.is_alive()


def test_without_async_work_there_is_no_thread(progress):
    run_now(progress, "inline", lambda: None)
    assert progress.thread is None


def test_drain_waits_and_names_unfinished_operations(progress):
    assert progress.drain(0) == ""
    gate = Gate()
    progress.start("slow one", gate)
    assert gate.began.wait(10)
    assert "slow one" in progress.drain(0.05)
    gate.opened.set()
    assert progress.drain(10) == ""


def test_an_idle_thread_keeps_nothing_alive(progress):
    class Array:
        pass

    array = Array()
    reference = weakref.ref(array)
    work = progress.start("use", lambda array=array: None)
    work.wait(10)
    del array
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert reference() is None


def test_join_waits_until_the_thread_has_dropped_everything():
    """At exit the daemon thread was still freeing a tensor when the interpreter ended: the process aborted."""
    progress, dropped = Progress(), threading.Event()

    class Slow:
        def __del__(self):
            time.sleep(0.2)
            dropped.set()

    def run(slow=Slow()):  # noqa: B008
        return None

    progress.start("slow to drop", run).wait()
    del run
    progress.close()
    progress.join(5)
    assert dropped.is_set()
    assert progress.thread is not None and not progress.thread.is_alive()


def test_a_work_reports_its_run_time(progress):
    slow = progress.start("slow", lambda: time.sleep(0.02))

    def divide():
        time.sleep(0.01)
        return 1 / 0

    fails = progress.start("fails", divide)
    slow.wait()
    with pytest.raises(ZeroDivisionError):
        fails.wait()
    assert slow.seconds >= 0.02
    assert fails.seconds >= 0.01


class Handler(Journal):
    """A journal in which a signal comes, and its handler calls, while something is being queued."""

    def __init__(self):
        super().__init__()
        self.call, self.refused = None, []

    def queue(self, text, x=None):
        try:
            call, self.call = self.call, None
            if call is not None:
                call()
        except UsageError as error:
            self.refused.append(str(error))
        return super().queue(text, x)


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_while_another_is_being_queued_is_refused(waits):
    """It waited for the lock that its own thread holds."""
    handler = Handler()
    progress = Progress(journal=handler)

    def call():
        if waits:
            progress.run_queued("nested", lambda: None)
        else:
            progress.start("nested", lambda: None)

    handler.call = call
    assert progress.start("outer", lambda: 1).wait(10) == 1
    assert len(handler.refused) == 1 and "in the middle of another call" in handler.refused[0]
    progress.close()


def test_an_operation_interrupted_while_queued_is_not_an_unseen_failure(progress, monkeypatch):
    """Its error, already raised in the caller, ended the job."""
    gate, start = Gate(), threading.Thread.start

    class Alarm(Exception):
        pass

    def started_and_interrupted(thread):
        start(thread)
        raise Alarm

    def fail():
        gate()
        raise ShutdownError("an earlier call failed")

    monkeypatch.setattr(threading.Thread, "start", started_and_interrupted)
    with pytest.raises(Alarm):
        progress.start("interrupted", fail)
    monkeypatch.undo()
    gate.opened.set()
    progress.start("next", lambda: None).wait(10)
    assert progress.unseen_failure() == ""
