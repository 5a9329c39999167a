"""Ranks that diverge after the calls that are compared in advance: never wrong data without an error."""

from __future__ import annotations

import time

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import CommlibError, MismatchError, PeerError, StallError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]

X = np.arange(1, 7.0)

# (what most ranks call, what the last rank calls)
CASES = {
    "broadcast root": (lambda c: c.broadcast(X.copy(), 0), lambda c: c.broadcast(X.copy(), c.size - 1)),
    "large broadcast root": (
        lambda c: c.broadcast(np.ones(100_000), 0),
        lambda c: c.broadcast(np.ones(100_000), c.size - 1),
    ),
    "object and array": (lambda c: c.broadcast_object(1), lambda c: c.all_reduce(X)),
    "array and object": (lambda c: c.all_reduce(X), lambda c: c.broadcast_object(1, c.size - 1)),
    "scatter root": (
        lambda c: c.scatter(np.ones(c.size), 0),
        lambda c: c.scatter(np.ones(c.size), c.size - 1),
    ),
    "object root": (lambda c: c.broadcast_object("a", 0), lambda c: c.broadcast_object("b", c.size - 1)),
    "empty shape": (lambda c: c.empty(100), lambda c: c.empty(100_000)),
    "native count": (
        lambda c: c.all_reduce(np.ones(100), algorithm="native"),
        lambda c: c.all_reduce(np.ones(200), algorithm="native"),
    ),
    "split and barrier": (lambda c: c.split(0), lambda c: c.barrier()),
    "barrier and split": (lambda c: c.barrier(), lambda c: c.split(0)),
    "native and split": (lambda c: c.all_reduce(X, algorithm="native"), lambda c: c.split(0)),
    "count": (lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_reduce(np.ones(6))),
    "reduce root": (lambda c: c.reduce(X, root=0), lambda c: c.reduce(X, root=c.size - 1)),
}

# Both sides compare these whatever their number, so nothing is sent.
COMPARED = {"empty shape", "native count", "native and split"}


def without_board(comm, **settings):
    """Return a group of all ranks that communicate by messages only, as on different nodes."""
    config = Config(node_path=False, timeout=20, **settings)
    return Communicator(MpiTransport(comm.native.Dup()), Runtime(config))


@pytest.mark.parametrize("name", CASES)
def test_calls_that_diverge_after_the_compared_ones(comm, name):
    """They were accepted: 1001 for 1 + 1, broadcasts from two roots, SIGBUS in memory of two sizes."""
    group = without_board(comm, check_first=2)
    for _ in range(4):
        group.all_reduce(X)
        group.barrier()
    usual, odd = CASES[name]
    with pytest.raises((MismatchError, PeerError)):
        (odd if comm.rank == comm.size - 1 else usual)(group)
        # A root that only sends learns of it at the next call in which it receives.
        assert (group.all_reduce(np.ones(3)) == comm.size).all()
        assert (group.all_reduce(np.ones(3)) == comm.size).all()
    if name in COMPARED:
        assert (group.all_reduce(np.ones(3)) == comm.size).all()
    else:
        with pytest.raises(CommlibError):
            group.all_reduce(np.ones(3))
    comm.barrier()


def test_the_error_names_both_calls(comm):
    group = without_board(comm, check_first=0)
    group.all_reduce(X)
    with pytest.raises(CommlibError) as caught:
        group.broadcast(X.copy(), 0 if comm.rank else 1)
        group.all_reduce(X)
    texts = comm.all_gather_object(str(caught.value))
    assert any("root=0" in text and "root=1" in text for text in texts)
    comm.barrier()


def test_ranks_that_exit_after_different_calls_report_it(comm, caplog):
    group = without_board(comm, check_first=0)
    group.all_reduce(X)
    group.broadcast(X.copy(), 0 if comm.rank == 0 else comm.size - 1)
    comm.barrier()
    group.group.leave()
    assert any("made different calls" in text for text in comm.all_gather_object(caplog.text))


@pytest.mark.parametrize("verb", ["split", "all_reduce", "native"])
def test_a_late_rank_is_named_between_nodes_too(comm, verb):
    """A split waited for ever inside MPI, whatever COMMLIB_TIMEOUT was; and no wait named the late rank."""
    group = Communicator(MpiTransport(comm.native.Dup()), Runtime(Config(node_path=False, timeout=1)))
    group.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(3)
    else:
        with pytest.raises((StallError, PeerError)) as caught:
            if verb == "split":
                group.split(0)
            else:
                group.all_reduce(X, algorithm="native" if verb == "native" else "auto")
        if isinstance(caught.value, StallError):
            assert f"not arrived: rank {comm.size - 1}" in str(caught.value)
    comm.barrier()


@pytest.mark.parametrize("setting_up", ["split", "empty"])
def test_a_compared_call_against_one_that_sends_fails_the_group(comm, setting_up):
    """The comparing rank had sent nothing, and continued: its next sum used the other ranks' earlier call."""
    group = without_board(comm, check_first=2)
    for _ in range(4):
        group.all_reduce(X)
    odd = comm.rank == comm.size - 1
    with pytest.raises((MismatchError, PeerError)) as first:
        if odd:
            group.split(0) if setting_up == "split" else group.empty(5)
        else:
            group.all_reduce(np.full(8, 1000.0))
    for call in (lambda: group.all_reduce(np.ones(8)), group.barrier, lambda: group.split(0), lambda: group.empty(5)):
        with pytest.raises(type(first.value)) as later:
            call()
        assert str(later.value) == str(first.value) and "not run on rank" in "".join(later.value.__notes__)
    comm.barrier()


def test_ranks_that_exit_after_extra_calls_report_it(comm, caplog):
    """A root that only sends waits for nobody: its last broadcast silently reached no rank."""
    group = without_board(comm, check_first=0)
    group.all_reduce(X)
    if comm.rank == 0:
        group.broadcast(X.copy(), 0)
    comm.barrier()
    group.group.leave()
    assert all("made different calls" in text for text in comm.all_gather_object(caplog.text)[:2])


def test_reports_of_a_long_wait_are_all_received(comm):
    """A rank in a long wait sends the others its calls. Those that did not wait received none until MPI ended."""
    config = Config(node_path=False, timeout=20, stall_warning=0.4)  # a wait is long after half of that
    group = Communicator(MpiTransport(comm.native.Dup()), Runtime(config))
    group.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(1)
    group.barrier()
    group.group.leave(deadline=time.monotonic() + 20)
    comm.barrier()
    assert not group.native.Iprobe()
    comm.barrier()
