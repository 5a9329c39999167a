"""The dump of a rank when a job hangs: its calls, its waits, and the position of the user's code."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.observe.dump import GroupState
from commlib.observe.flight_recorder import LAST
from commlib.process.sources import is_ours, is_users
from commlib.runtime import hang_state
from commlib.runtime.stacks import all_threads
from tests.bodies.loopback import run


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("all_reduce of 4 x float32, op=sum, algorithm=auto", 16),
        ("all_gather of shape (3, 5) bfloat16, algorithm=auto", 30),
        ("broadcast of shape () float64, root=0, algorithm=auto", 8),
        ("barrier", -1),
        ("split, row", -1),
        ("sum of 4 x apples", -1),
    ],
)
def test_sizes_are_parsed_from_the_text_of_a_call(text, nbytes):
    assert hang_state.nbytes_of(text) == nbytes


def test_the_last_calls_of_each_group_are_recorded():
    """With their numbers, and the calls queued behind them."""
    entered, leave = threading.Event(), threading.Event()

    def wait_in_the_middle():
        entered.set()
        leave.wait(20)

    def body(comm):
        for _ in range(LAST + 6):
            comm.barrier()
        row = comm.split(0, name="row")
        row.all_reduce(np.ones(4, "float32"))
        states: tuple[GroupState, ...] = ()
        if comm.rank == 0:
            works = [row.plan_program("a program", wait_in_the_middle).start(), row.barrier_async()]
            assert entered.wait(20)
            states = hang_state.group_states(comm.runtime)
            leave.set()
        else:
            works = [row.plan_program("a program", lambda: None).start(), row.barrier_async()]
        for work in works:
            work.wait()
        return states

    world, row = run(2, body)[0]
    assert (world.name, world.ranks, world.calls, len(world.operations)) == ("world", ((0, 1),), LAST + 7, LAST)
    assert [operation.sequence for operation in world.operations] == list(range(8, LAST + 8))
    assert (world.operations[-1].verb, world.operations[-1].state) == ("split", "ended")
    assert [(operation.verb, operation.sequence, operation.state) for operation in row.operations] == [
        ("all_reduce", 1, "ended"), ("a", 2, "running"), ("barrier", 0, "queued"),
    ]  # fmt: skip


def test_a_wait_is_recorded_only_while_it_lasts():
    release = threading.Event()

    def body(comm):
        if comm.rank == 1:
            assert release.wait(20)
        states = []

        def look():
            deadline = time.monotonic() + 20
            while not (stuck := hang_state.find_stuck(comm.runtime, 0.2)) and time.monotonic() < deadline:
                time.sleep(0.01)
            states.extend([stuck, hang_state.find_wait_starts(comm.runtime), hang_state.waits(comm.runtime)])
            release.set()

        thread = threading.Thread(target=look)
        if comm.rank == 0:
            thread.start()
        me = threading.get_ident()
        comm.all_reduce(np.ones(4, "float32"))
        if comm.rank == 0:
            thread.join()
            states.append(hang_state.waits(comm.runtime))
        return me, states

    me, (stuck, began, (wait,), after) = run(2, body, config=Config(timeout=30))[0]
    assert len(stuck) == 1 and stuck <= began
    assert wait.text == "world: all_reduce of 4 x float32, op=sum, algorithm=auto" and wait.sequence == 1
    assert (wait.group, wait.peers, wait.thread) == ("world", None, me) and wait.seconds > 0.2
    assert after == []


def test_the_users_frame_is_the_last_outside_libraries():
    """Here it is a function of this file that waits in the standard library."""
    release = threading.Event()

    def wait_for_it():
        release.wait(20)

    thread = threading.Thread(target=wait_for_it, name="busy")
    thread.start()
    try:
        states = {state.name: state for state in all_threads(besides=threading.get_ident())}
    finally:
        release.set()
        thread.join()
    place = states["busy"].place
    assert place is not None and (place.function, place.code) == ("wait_for_it", "release.wait(20)")
    assert not states["busy"].inside and threading.main_thread().name not in states
    assert states["busy"].stack[0].function == "_bootstrap"


def test_files_belong_to_the_user_or_a_library():
    assert is_ours(hang_state.__file__) and not is_users(hang_state.__file__)
    assert is_users(__file__) and not is_ours(__file__)
    assert not is_users(np.__file__) and not is_users(threading.__file__) and not is_users("<frozen importlib>")
    assert is_users(hang_state.__file__.replace("/commlib/runtime/", "/commlib_of_mine/"))
    assert sys.modules["pytest"].__file__ and not is_users(pytest.__file__)
