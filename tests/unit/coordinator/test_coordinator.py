"""The coordinator on ranks that are threads: any order, every verb, and errors that all ranks see."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.coordinator import Coordinator, OpRequest
from commlib.coordinator.negotiation import Negotiation
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, UsageError
from tests.bodies.loopback import run


def coordinated(size, function, **options):
    """Run `function(coordinator, rank)` on ranks that are threads, and close the coordinators."""

    def rank_main(comm):
        coordinator = Coordinator(comm, range(comm.size))
        try:
            return function(coordinator, comm.rank)
        finally:
            comm.barrier()
            coordinator.close()

    return run(size, rank_main, **options)


def all_reduce(name, array, op="sum", **options):
    shapes = (("float32", array.shape),)
    return OpRequest("allreduce", name, shapes, (("op", op), *options.items()))


def start(coordinator, name, array, **options):
    return coordinator.submit(all_reduce(name, array, **options), [array], [array])


@pytest.mark.parametrize("nodes", [None, [0, 0, 1], [0, 1, 2]])
def test_named_operations_may_come_in_any_order(nodes):
    def work(coordinator, rank):
        arrays = {f"t{i}": np.full(i % 7 + 1, i + rank, np.float32) for i in range(60)}
        for again in range(3):
            for i, array in enumerate(arrays.values()):
                array[...] = i + rank + again
            order = list(arrays)
            random.Random(10 * again + rank).shuffle(order)
            works = [start(coordinator, name, arrays[name]) for name in order]
            for one in random.Random(again).sample(works, len(works)):
                assert one.wait()[0] is arrays[one.description]
            for i, array in enumerate(arrays.values()):
                assert (array == 3 * (i + again) + 3).all()
        return coordinator.cycles

    assert max(coordinated(3, work, nodes=nodes)) < 150  # not a cycle for each


def test_only_ranks_that_do_not_wait_get_a_thread():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "commlib-coordinator"}

    before = threads()

    def work(coordinator, rank):
        request = all_reduce("x", np.ones(2, np.float32))
        coordinator.submit(request, [np.ones(2, np.float32)], [np.ones(2, np.float32)], blocking=True).wait()
        assert threads() <= before
        coordinator.comm.barrier()  # all have counted
        pending = start(coordinator, "x", np.ones(2, np.float32))
        deadline = time.monotonic() + 10
        while not pending.done() and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert pending.done() and threads() - before
        if rank == 0:
            early = start(coordinator, "early", np.ones(2, np.float32))
            with pytest.raises(StallError, match="not done after"):
                early.wait(0.05)
            coordinator.comm.send(np.zeros(1), 1)
            assert early.wait()[0].tolist() == [2, 2]
        else:
            coordinator.comm.recv(np.zeros(1), 0)
            start(coordinator, "early", np.ones(2, np.float32)).wait()

    coordinated(2, work)


def test_an_idle_coordinator_runs_no_cycles():
    def work(coordinator, rank):
        start(coordinator, "x", np.ones(2, np.float32)).wait()
        before = coordinator.cycles
        time.sleep(0.3)
        return coordinator.cycles - before

    assert coordinated(2, work) == [0, 0]


def test_waiting_for_different_things_runs_few_cycles():
    def work(coordinator, rank):
        names = ["a", "b"] if rank == 0 else ["b", "a"]
        first = start(coordinator, names[0], np.ones(2, np.float32))
        time.sleep(0.5)
        cycles = coordinator.cycles
        second = start(coordinator, names[1], np.ones(2, np.float32))
        first.wait(), second.wait()
        return cycles

    assert all(cycles < 40 for cycles in coordinated(2, work))


def test_a_disagreement_fails_on_all_ranks_and_others_continue():
    def work(coordinator, rank):
        good = start(coordinator, "good", np.ones(2, np.float32))
        bad = start(coordinator, "bad", np.ones(2 + rank, np.float32))
        with pytest.raises(MismatchError, match=r"allreduce 'bad': rank \d: .*shape is \(2,\) on rank 0 but \(3,\)"):
            bad.wait()
        assert good.wait()[0].tolist() == [2, 2]
        assert start(coordinator, "bad", np.ones(2, np.float32)).wait()[0].tolist() == [2, 2]

    coordinated(2, work)


def test_a_name_that_is_pending_is_refused_at_once():
    def work(coordinator, rank):
        first = start(coordinator, "x", np.ones(2, np.float32))
        if rank == 0:
            with pytest.raises(UsageError, match="an operation of this name is in flight already"):
                start(coordinator, "x", np.ones(2, np.float32))
            coordinator.comm.send(np.zeros(1), 1)
        first.wait()

    def delayed(coordinator, rank):
        if rank == 1:
            coordinator.comm.recv(np.zeros(1), 0)
        work(coordinator, rank)

    coordinated(2, delayed)


def test_a_missing_rank_is_named(caplog):
    def work(coordinator, rank):
        start(coordinator, "before", np.ones(2, np.float32)).wait()
        if rank == 0:
            expected = "allreduce 'x': rank 0: not submitted by rank 1; rank 1 waits for 'y'"
            with pytest.raises(StallError, match=expected):
                start(coordinator, "x", np.ones(2, np.float32)).wait()
        else:
            time.sleep(0.5)  # so that rank 0 is the first to give up
        start(coordinator, "y", np.ones(2, np.float32)).wait()

    coordinated(2, work, config=Config(timeout=1.0, stall_warning=0.6))
    assert "allreduce 'x': rank 0 has waited 1 s: not submitted by rank 1; rank 1 waits for 'y'" in caplog.text


def test_an_idle_rank_is_named_with_its_last_operation():
    def work(coordinator, rank):
        start(coordinator, "before", np.ones(2, np.float32)).wait()
        if rank == 0:
            with pytest.raises(StallError) as caught:
                start(coordinator, "x", np.ones(2, np.float32)).wait()
            assert "rank 0: gave up after" in str(caught.value)
            assert "not there yet: rank 1" in str(caught.value)
            assert "this rank waits for 'x'; the last operation of all ranks was allreduce 'before'" in str(
                caught.value
            )
        return rank

    def rank_main(comm):
        coordinator = Coordinator(comm, range(comm.size))
        return work(coordinator, comm.rank)

    assert run(2, rank_main, config=Config(timeout=1.5)) == [0, 1]  # enough for the start on a busy machine


def test_operations_pending_at_the_end_raise():
    def rank_main(comm):
        coordinator = Coordinator(comm, [0, 1])
        if comm.rank == 1:
            return  # it makes no request
        pending = start(coordinator, "x", np.ones(2, np.float32))
        assert coordinator.drain(0.05) == "unfinished allreduce 'x'"
        coordinator.close()
        with pytest.raises(ShutdownError, match="before all ranks had submitted"):
            pending.wait()
        with pytest.raises(ShutdownError, match="has been shut down"):
            start(coordinator, "later", np.ones(2, np.float32))

    run(2, rank_main)


def test_threads_share_a_coordinator():
    def work(coordinator, rank):
        errors = []

        def thread(number):
            try:
                for again in range(20):
                    array = np.full(3, number + again, np.float32)
                    start(coordinator, f"{number}.{again}", array).wait()
                    assert (array == 2 * (number + again)).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors, errors

    coordinated(2, work)


def test_an_error_affects_only_its_operation():
    def work(coordinator, rank):
        wrong = OpRequest("allgather", "wrong", (("float32", (None,)),))
        pending = coordinator.submit(wrong, [np.zeros((), np.float32)])  # no rows: refused when it is run
        good = start(coordinator, "good", np.ones(2, np.float32))
        with pytest.raises(CommlibError):
            pending.wait()
        assert good.wait()[0].tolist() == [2, 2]

    coordinated(2, work)


def test_a_rank_with_another_request_that_never_returns_is_named():
    """A full announcement is stored: no second request is needed."""
    over = threading.Barrier(3)

    def rank_main(comm):
        coordinator = Coordinator(comm, [3, 5, 8])
        if comm.rank == 2:
            x = np.ones(2, np.float32)
            coordinator.submit(all_reduce("b", x), [x], [x], blocking=True)

            def stuck():
                if coordinator.cycles < 8:
                    return False
                over.wait(20)
                coordinator.close()
                return True

            coordinator.drive(stuck)
            return
        if comm.rank == 1:
            time.sleep(0.2)
        pending = start(coordinator, "a", np.ones(2, np.float32))
        with pytest.raises(StallError) as caught:
            pending.wait()
        message = str(caught.value)
        assert f"allreduce 'a': rank {coordinator.members[comm.rank]}: gave up after 0.8 s" in message
        assert "not there yet: rank 8; this rank waits for 'a'; 'a' was submitted by rank" in message
        assert (
            "rank 8 has submitted 'b', but made no progress since; no operation of all ranks has run yet; look"
            in message
        )
        over.wait(20)

    run(3, rank_main, config=Config(timeout=0.8))


class Interrupted(Negotiation):
    """Raises, if set, as Ctrl-C would just after the next request was accepted."""

    interrupts = False

    def submit(self, request):
        super().submit(request)
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("known", [False, True])
def test_an_interrupted_submit_is_withdrawn(known):
    """Announced to the others but not pending here, it ran with zeros, as for a joined rank."""

    def rank_main(comm):
        negotiation = Interrupted(comm.rank, range(comm.size))
        coordinator = Coordinator(comm, range(comm.size), negotiation=negotiation)
        if known:
            start(coordinator, "x", np.ones(2, np.float32)).wait()
        if comm.rank == 1:
            negotiation.interrupts = True
            with pytest.raises(KeyboardInterrupt):
                start(coordinator, "x", np.ones(2, np.float32))
            assert not negotiation.waiting and negotiation.announce()[0::2] == (0, ())
        assert start(coordinator, "x", np.ones(2, np.float32)).wait()[0].tolist() == [2, 2]
        comm.barrier()
        coordinator.close()

    run(2, rank_main)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_an_error_of_one_rank_alone_ends_the_set_on_all(nodes):
    """It ended that operation alone: the others waited in it, or mistook the next exchange for it."""

    def rank_main(comm):
        coordinator = Coordinator(comm, [4, 7])
        start(coordinator, "x", np.ones(2, np.float32)).wait()
        array = np.ones(2, np.float32)
        pending = [start(coordinator, name, array.copy()) for name in "ab"]
        if comm.rank == 1:
            all_reduce = comm.all_reduce

            def no_room(x, op="sum", **options):
                if op == "sum":  # a cycle's own is an "and"
                    raise MemoryError("no room")
                return all_reduce(x, op, **options)

            comm.all_reduce = no_room
        begin = f"allreduce 'a': rank {coordinator.members[comm.rank]}: "
        expected = "interrupted by MemoryError: no room" if comm.rank == 1 else "waited for a rank that will not come: "
        expected += "" if comm.rank == 1 else "rank 7 has given up world: it was interrupted by MemoryError: no room"
        for _ in range(100):
            with pytest.raises((PeerError, MemoryError)) as caught:
                pending[0].wait()
            if not isinstance(caught.value, MemoryError):
                break  # of the thread that ran it, once
        assert begin + expected in str(caught.value)
        with pytest.raises(PeerError, match="allreduce 'b': rank"):
            pending[1].wait()
        with pytest.raises(PeerError, match=r"allreduce 'c': rank .*cannot be used any more") as first:
            start(coordinator, "c", array)
        with pytest.raises(PeerError) as second:
            start(coordinator, "c", array)
        assert first.value is not second.value
        time.sleep(1.5)

    run(2, rank_main, nodes=nodes, config=Config(timeout=6))
