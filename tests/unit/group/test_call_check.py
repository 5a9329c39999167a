"""Comparing calls across nodes, where ranks share no board."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import MismatchError, PeerError
from commlib.group.call_check import compare_messages, mismatch
from commlib.transport.loopback import transports
from tests.bodies import checks
from tests.bodies.loopback import run

NODES = pytest.mark.parametrize(
    "nodes", [[0, 1], [0, 0, 1], [0, 1, 0, 1, 2]], ids=lambda nodes: "".join(map(str, nodes))
)

ODD = {
    "count": (lambda c: c.all_reduce(np.ones(3)), lambda c: c.all_reduce(np.ones(4))),
    "dtype": (lambda c: c.all_reduce(np.ones(3)), lambda c: c.all_reduce(np.ones(3, np.float32))),
    "op": (lambda c: c.all_reduce(np.ones(3)), lambda c: c.all_reduce(np.ones(3), "max")),
    "verb": (lambda c: c.all_reduce(np.ones(3)), lambda c: c.all_gather(np.ones(3))),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(np.ones(3))),
    "root": (lambda c: c.broadcast(np.ones(3), 0), lambda c: c.broadcast(np.ones(3), 1)),
    "object": (lambda c: c.barrier(), lambda c: c.broadcast_object(3)),
    "large": (lambda c: c.all_reduce(np.ones(300_000)), lambda c: c.all_reduce(np.ones(300_001))),
}


@NODES
@pytest.mark.parametrize("case", ODD)
def test_a_mismatch_raises_on_all_ranks_and_the_group_stays_usable(nodes, case):
    usual, odd = ODD[case]

    def check(comm):
        for who in (0, comm.size - 1):
            with pytest.raises(MismatchError, match=rf"this is rank {comm.rank}\)[\s\S]*rank {who}: "):
                (odd if comm.rank == who else usual)(comm)
            checks.all_reduce(comm, "float32", (5000,))
            checks.all_gather(comm, "int8", (3,))

    run(len(nodes), check, nodes=nodes, config=Config(timeout=10))


@pytest.mark.parametrize("case", ODD)
def test_a_mismatch_on_one_node_leaves_scheduled_verbs_in_step(case):
    usual, odd = ODD[case]

    def check(comm):
        for _ in range(2):
            with pytest.raises(MismatchError):
                (odd if comm.rank == 1 else usual)(comm)
            checks.all_reduce(comm, "float32", (50,), algorithm="ring")
            checks.all_gather(comm, "int8", (3,))

    run(3, check, config=Config(timeout=6))


@NODES
@pytest.mark.parametrize("case", ODD)
def test_a_mismatch_after_the_first_calls_does_not_hang(nodes, case):
    """'auto' compares a group's first calls only, and again when a wait gets long."""
    usual, odd = ODD[case]

    def check(comm):
        for _ in range(4):
            comm.barrier()
        with pytest.raises(MismatchError):
            (odd if comm.rank == 1 else usual)(comm)
            comm.barrier()  # a rank that received all its messages raises at its next wait

    run(len(nodes), check, nodes=nodes, config=Config(timeout=10, check_first=2))


def test_a_late_rank_is_not_a_mismatch():
    """A long wait makes the others compare; the late rank then does the same, and the call completes."""
    import time

    def check(comm):
        for step in range(3):
            if comm.rank == step % 2:
                time.sleep(1.5)
            assert (comm.all_reduce(np.full(2000, step)) == 3 * step).all()

    run(3, check, nodes=[0, 0, 1], config=Config(timeout=20, check_first=0))


def test_always_compares_every_call():
    def check(comm):
        for _ in range(80):
            comm.barrier()
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(3 + comm.rank))
        comm.barrier()

    run(2, check, nodes=[0, 1], config=Config(timeout=10, check="always"))


def test_the_error_groups_ranks_by_call():
    text = str(mismatch("world", 7, 2, ["a", "b", "a", "c"]))
    assert "call number 7; this is rank 2" in text
    assert "  ranks 0, 2: a\n  rank 1: b\n  rank 3: c\n" in text


def test_messages_are_compared():
    import threading

    results: dict[tuple[int, int], list[str] | None] = {}

    def use(end):
        results[end.rank, 1] = compare_messages(end, 1, "same", lambda: None)
        results[end.rank, 2] = compare_messages(end, 2, f"call {end.rank} é" + "x" * 2000, lambda: None)
        results[end.rank, 3] = compare_messages(end, 3, "same", lambda: None)

    threads = [threading.Thread(target=use, args=(end,), daemon=True) for end in transports(3, [0, 1, 2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for rank in range(3):
        assert results[rank, 1] is None and results[rank, 3] is None
        texts = results[rank, 2]
        assert texts is not None and [text[:8] for text in texts] == ["call 0 é", "call 1 é", "call 2 é"]


class Enough(Exception):
    """Raised by a signal handler, in the middle of a wait."""


@pytest.mark.parametrize("calls", [0, 1, 40])
@pytest.mark.parametrize("waited", [0.0, 1.5])
def test_ranks_do_not_wait_for_an_interrupted_rank(calls, waited):
    """It notified only ranks in its next call; ranks in the same call waited for ever."""
    import threading
    import time

    interrupted_rank_left = threading.Event()

    def check(comm):
        for _ in range(calls):
            comm.barrier()
        if comm.rank == 2:
            watch, until = comm.group.waits.watch, time.monotonic() + waited

            def interrupted(text, peers=None):
                watchdog = watch(text, peers)

                def on_wait():
                    watchdog()  # after a second it notifies the others that this rank waits
                    if time.monotonic() > until:
                        raise Enough

                return on_wait

            comm.group.waits.watch = interrupted
            with pytest.raises(Enough):
                comm.barrier()
            interrupted_rank_left.set()
            return
        if comm.rank == 1:
            assert interrupted_rank_left.wait(20)  # until then the call cannot end; rank 0 waits in it
        expected = r"barrier.*: waited for a rank that will never arrive: .*rank 2 has given up .* half-way by Enough"
        with pytest.raises(PeerError, match=expected):
            comm.barrier()
        comm.group.leave("waited in vain")

    run(3, check, nodes=[0, 1, 2], config=Config(timeout=10))
