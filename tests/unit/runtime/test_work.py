"""Work, and the works of messages: waiting, timeouts, several waiters, errors."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import StallError, UsageError
from commlib.runtime.work import Work
from tests.bodies.loopback import run


def test_a_work_has_a_result():
    work = Work("adding")
    assert not work.done()
    assert repr(work) == "<Work adding: pending>"
    work.finish(5)
    assert work.done() and work.wait() == work.wait(0) == work.result() == 5
    assert work.exception() is None
    assert repr(work) == "<Work adding: done>"


def test_a_work_raises_its_error():
    work, error = Work("adding"), UsageError("no")
    work.finish(error=error)
    assert work.done() and work.exception() is error
    for collect in (work.wait, work.result):
        with pytest.raises(UsageError) as caught:
            collect()
        assert caught.value is error
    assert repr(work) == "<Work adding: failed>"


def test_a_timeout_does_not_stop_the_work():
    work = Work("adding")
    start = time.monotonic()
    with pytest.raises(StallError, match=r"adding: not done after 0.05 s; it is still running, wait again"):
        work.wait(0.05)
    assert 0.04 < time.monotonic() - start < 2
    with pytest.raises(TimeoutError):  # StallError is one
        work.wait(0)
    work.finish(1)
    assert work.wait(0) == 1


def test_many_waiters_get_the_same_result():
    work, results = Work("adding"), []
    threads = [threading.Thread(target=lambda: results.append(work.wait(10))) for _ in range(8)]
    for thread in threads:
        thread.start()
    work.finish(result := object())
    for thread in threads:
        thread.join(10)
    assert len(results) == 8 and all(one is result for one in results)


def test_waiters_of_a_message_each_have_their_own_timeout():
    """One waiter once held the lock that the others' timeouts should have counted for."""

    def check(comm):
        if comm.rank:
            comm.barrier()
            comm.send(np.ones(1), 0)
            return
        work = comm.recv_async(out := np.zeros(1), 1)
        patient = threading.Thread(target=work.wait)
        patient.start()
        time.sleep(0.05)
        start = time.monotonic()
        with pytest.raises(StallError, match=r"not done after 0.1 s"):
            work.wait(0.1)
        assert time.monotonic() - start < 1.5
        assert not work.done()
        comm.barrier()
        patient.join(10)
        assert work.wait() is out and out[0] == 1 and work.exception() is None

    run(2, check, config=Config(timeout=5))


def test_a_message_moves_without_being_waited_for():
    def check(comm):
        works = [
            comm.send_async(np.full(3, comm.rank), 1 - comm.rank),
            comm.recv_async(out := np.zeros(3, int), 1 - comm.rank),
        ]
        deadline = time.monotonic() + 5
        while not all(Work.done(work) for work in works) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(Work.done(work) for work in works)
        assert (out == 1 - comm.rank).all()

    run(2, check)


def test_waiting_again_does_not_lengthen_the_traceback():
    """Each wait added its frames to those of the one error."""
    work, lengths = Work("fails"), []
    try:
        raise ValueError("once")
    except ValueError as error:
        work.finish(error=error)
    for _ in range(5):
        with pytest.raises(ValueError, match="once") as caught:
            work.wait()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
