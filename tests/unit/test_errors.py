"""Errors name group, call, rank, expected and actual values, and a remedy, and are the right builtin errors."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

import commlib
from commlib import errors
from commlib.config.settings import Config
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, UsageError
from tests.bodies.loopback import run


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Load the code of calls here: on a busy machine that takes longer than ranks wait below."""
    run(3, lambda comm: (comm.all_reduce(np.ones(3)), comm.broadcast_object(1)))


def test_errors_have_builtin_bases():
    kinds = [getattr(errors, name) for name in dir(errors) if name.endswith("Error")]
    assert len(kinds) == 7 and all(issubclass(kind, CommlibError) for kind in kinds)
    assert all(getattr(commlib, kind.__name__) is kind for kind in kinds)
    assert issubclass(UsageError, ValueError) and issubclass(StallError, TimeoutError)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]])
def test_a_mismatch_is_described(nodes):
    def check(comm):
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(np.ones(3), "max" if comm.rank == 1 else "sum", algorithm="ring")
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("world: the ranks do not make the same call (call number ")
        assert lines[0].endswith(f"; this is rank {comm.rank}):")
        assert lines[1] == "  ranks 0, 2: all_reduce of 3 x float64, op=sum, algorithm=ring"
        assert lines[2] == "  rank 1: all_reduce of 3 x float64, op=max, algorithm=ring"
        assert lines[3].startswith("All ranks of a group must make the same calls in the same order.")

    run(3, check, nodes=nodes)


WAITS = {
    "all_reduce of 3 x float64": lambda comm: comm.all_reduce(np.ones(3)),
    "barrier": lambda comm: comm.barrier(),
    "recv from rank 2, tag 5": lambda comm: comm.recv(np.ones(3), 2, 5),
    "broadcast_object, root=0": lambda comm: comm.broadcast_object(1),
}


@pytest.mark.parametrize("text", WAITS)
def test_a_stall_is_described(text):
    def check(comm):
        if comm.rank == 2:
            return
        with pytest.raises(StallError) as caught:
            WAITS[text](comm)
        message = str(caught.value)
        assert message.startswith(f"world: {text}") and f"rank {comm.rank}: gave up after 0." in message
        assert "COMMLIB_TIMEOUT" in message and "look at what the late ranks are doing" in message
        assert "recv" in text or "not arrived: rank 2" in message

    run(3, check, config=Config(timeout=0.3))


@pytest.mark.parametrize("text", WAITS)
def test_a_peers_error_is_described(text):
    def check(comm):
        if comm.rank == 2:
            comm.group.leave()
            return
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            WAITS[text](comm)
        assert time.monotonic() - start < 3
        message = str(caught.value)
        assert message.startswith(f"world: {text}") and f": rank {comm.rank}: waited for a rank" in message
        assert "will never arrive: rank 2 has shut commlib down or left the program" in message

    run(3, check, config=Config(timeout=8))


def test_every_call_after_a_failure_names_the_failure():
    def check(comm):
        if comm.rank == 1:
            return
        with pytest.raises(StallError) as first:
            comm.all_reduce(np.ones(3))
        for call in (lambda: comm.barrier(), lambda: comm.all_reduce(np.ones(3)), lambda: comm.split(0)):
            with pytest.raises(StallError) as later:
                call()
            assert str(later.value) == str(first.value)

    run(2, check, config=Config(timeout=0.3))


def test_a_message_between_two_ranks_ignores_departed_ranks():
    def check(comm):
        if comm.rank == 2:
            comm.group.leave()
        elif comm.rank == 1:
            assert comm.recv(np.zeros(2), 0).tolist() == [1, 1]
        else:
            time.sleep(1.2)
            comm.send(np.ones(2), 1)

    run(3, check, config=Config(timeout=8))


def test_a_departed_rank_is_an_error_of_its_group():
    def check(comm):
        group = comm.split(0)
        if comm.rank == 1:
            for each in list(comm.runtime.groups):
                each.leave()
            return
        with pytest.raises(PeerError, match="rank 1 has shut"):
            group.barrier()

    run(2, check, config=Config(timeout=8))


def test_calls_after_the_shutdown_are_errors():
    def check(comm):
        work = comm.recv_async(np.zeros(2), 1 - comm.rank)
        comm.group.progress.close()
        comm.runtime.closing = True
        with pytest.raises(ShutdownError, match="recv from rank"):
            work.wait()
        for call in (lambda: comm.send(np.ones(1), 0), lambda: comm.all_reduce(np.ones(3)), lambda: comm.barrier()):
            with pytest.raises(ShutdownError, match="shut down"):
                call()

    run(2, check)


def test_a_long_wait_is_reported_once_with_the_late_ranks(caplog):
    def check(comm):
        if comm.rank == 2:
            time.sleep(0.8)
        comm.all_reduce(np.ones(3))

    logging.getLogger("commlib").propagate = True
    with caplog.at_level(logging.WARNING, "commlib"):
        run(3, check, config=Config(timeout=8, stall_warning=0.2))
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == 2
    for rank, message in enumerate(messages):
        assert message.startswith("world: all_reduce of 3 x float64") and "not arrived: rank 2" in message
        assert f"rank {rank} has waited" in message


def test_integers_are_required():
    """root="0" was a TypeError, split(1.5) was taken for split(1)."""
    x = np.ones(4)
    for wrong in ("0", 1.5, None, True, np.float64(0), [0]):
        calls = {
            "reduce: root": lambda comm, wrong=wrong: comm.reduce(x, root=wrong),
            "broadcast: root": lambda comm, wrong=wrong: comm.broadcast(x, wrong),
            "gather: root": lambda comm, wrong=wrong: comm.gather(x, wrong),
            "scatter: root": lambda comm, wrong=wrong: comm.scatter(x, wrong),
            "broadcast_object: root": lambda comm, wrong=wrong: comm.broadcast_object(x, wrong),
            "split: color": lambda comm, wrong=wrong: comm.split(wrong),
            "split: key": lambda comm, wrong=wrong: comm.split(0, wrong),
            "send: peer": lambda comm, wrong=wrong: comm.send(x, wrong),
            "recv: tag": lambda comm, wrong=wrong: comm.recv(x, 0, wrong),
            "empty: a length of the shape": lambda comm, wrong=wrong: comm.empty((2, wrong)),
            "all_to_all_v: a split": lambda comm, wrong=wrong: comm.all_to_all_v(x, [2, wrong]),
        }

        def check(comm, calls=calls, wrong=wrong):
            for parameter, call in calls.items():
                with pytest.raises(UsageError) as caught:
                    call(comm)
                assert str(caught.value) == f"{parameter} is {wrong!r} ({type(wrong).__name__}), expected an integer"
            assert comm.split(np.int64(0), np.uint8(1)).broadcast(x, np.int32(1)).sum() == 4

        run(2, check)


@pytest.mark.parametrize(
    "shape", [2**62, (2**40, 2**40), (2**32, 2**32), (0, 2**64), (0, 2**40, 2**40)], ids=lambda shape: str(shape)
)
def test_impossible_sizes_are_refused(shape):
    """They were an OverflowError, or "cannot reshape"."""

    def check(comm):
        with pytest.raises(UsageError, match=r"empty: shape .* of float32 exceeds the address space"):
            comm.empty(shape)
        assert comm.empty((0, 2**40)).shape == (0, 2**40)

    run(2, check)
