"""The board and its kernels: mixed calls, more ranks than cores, mismatches, late ranks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import MismatchError, StallError
from commlib.execution.reduce_function import ReduceFunction
from commlib.kernels.host import node as kernels
from commlib.kernels.host.reduce import reduce_function
from commlib.node.board import NodeBoard
from commlib.node.collective import NodeCollective
from commlib.transport.loopback import transports
from tests.bodies.loopback import run

CONFIG = Config(timeout=10, slot_kib=1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_calls_of_mixed_sizes_match_numpy(size):
    """8 threads share the cores of any laptop, so ranks are descheduled at every point."""
    lengths = np.random.default_rng(0).choice([0, 1, 7, 128, 129, 500, 513, 1025, 4000], 150)

    def check(comm):
        symmetric = comm.empty(4000, "float64")
        for step, length in enumerate(map(int, lengths)):
            x = np.full(length, float(step + comm.rank))
            expected = step * size + sum(range(size))
            if step % 3 == 0:
                comm.all_reduce(x, out=x)
                assert (x == expected).all()
            elif step % 3 == 1:
                symmetric[:length] = x
                comm.all_reduce(symmetric[:length], out=symmetric[:length])
                assert (symmetric[:length] == expected).all()
            else:
                assert (comm.all_reduce_async(x).wait() == expected).all()
            if step % 10 == 0:
                comm.barrier()

    run(size, check, config=CONFIG)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("length", [3, 2000])
def test_a_mismatch_raises_on_all_ranks_and_the_board_stays_usable(size, length):
    def check(comm):
        for odd in range(size):
            x = np.ones(length, np.int64 if comm.rank == odd else np.float64)
            with pytest.raises(MismatchError) as caught:
                comm.all_reduce(x, out=x)
            assert f"rank {odd}: all_reduce of {length} x int64" in str(caught.value)
            assert (x == 1).all()
            for n in (3, 2000):
                assert (comm.all_reduce(np.ones(n)) == size).all()
            comm.barrier()

    run(size, check, config=CONFIG)


@pytest.mark.parametrize("length", [3, 300, 2000])
def test_a_late_rank_is_waited_for(length):
    """Late enough that the kernels return WAITING and are called again, also in the middle of a call."""

    def check(comm):
        for late in range(3):
            x = np.full(length, float(comm.rank))
            if comm.rank == late:
                time.sleep(0.15)
            comm.all_reduce(x, out=x)
            assert (x == 3).all()
            if comm.rank == late:
                time.sleep(0.15)
            assert (comm.all_reduce_async(x).wait() == 9).all()

    run(3, check, config=CONFIG)


def test_a_missing_rank_is_named():
    def check(comm):
        if comm.rank == 2:
            return
        with pytest.raises(StallError, match=r"world: all_reduce of 3 x .*rank \d: gave up .*not arrived: rank 2;"):
            comm.all_reduce(np.ones(3))
        with pytest.raises(StallError):  # out of step for good
            comm.barrier()

    run(3, check, config=Config(timeout=0.5))


# The kernels


def boards(size: int, slot_bytes: int = 1024) -> list[NodeBoard]:
    ends = transports(size)
    created: list[Any] = [None] * size

    def make(rank: int) -> None:
        created[rank] = NodeBoard(ends[rank].split_node(), list, slot_bytes=slot_bytes, spins=20)
        created[rank].enter(lambda: None)

    together(make, size)
    return created


def together(function: Any, size: int) -> None:
    threads = [threading.Thread(target=function, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@dataclass
class SlowOp:
    """A sum of float64 that takes long."""

    address: int
    item_bytes: int = 8
    divisor: int = 2


@pytest.mark.parametrize("epochs", range(4))
@pytest.mark.parametrize("first", [100, 600], ids=["small", "large"])
@pytest.mark.parametrize("second", [100, 600], ids=["small", "large"])
def test_a_fast_rank_does_not_overwrite_data_of_a_slow_reader(first, second, epochs):
    """A small call was followed by a large one, which wrote into the slot that the slow rank was still reading."""
    real = reduce_function("float64", "sum")

    def slow(*arguments: int) -> None:
        time.sleep(0.02)
        real.ctypes(*arguments)

    slow_function = ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * 7)(slow)

    slow_op = SlowOp(ctypes.cast(slow_function, ctypes.c_void_p).value or 0)

    def check(comm):
        for _ in range(epochs):  # slots alternate by the number of meetings
            comm.group.status.board.barrier(0, lambda: None)
        for _ in range(2):
            out = np.full(first, 1.0 + comm.rank)
            op: Any = ReduceFunction("float64", "sum", comm.size) if comm.rank == 0 else slow_op
            NodeCollective.all_reduce(comm.group.open(), "all_reduce", first, op).now(out, out)
            assert (comm.all_reduce(np.full(second, 1000.0)) == 2000).all()
            assert (out == 3).all()

    run(2, check, config=CONFIG)


def test_shares_cover_all_elements_once_in_whole_cache_lines():
    share = kernels.own_share
    for count in (0, 1, 7, 8, 63, 64, 65, 1000, 4097):
        for item in (1, 2, 4, 8, 16):
            for size in (1, 2, 3, 5, 8):
                parts = [share(count, item, rank, size) for rank in range(size)]
                assert parts[0][0] == 0 and parts[-1][1] == count
                assert all(a[1] == b[0] for a, b in pairwise(parts))
                assert all(start * item % 64 == 0 for start, stop in parts if stop > start)


def test_the_board_names_late_and_departed_ranks():
    both = boards(2)
    assert both[0].late() == [] and both[0].absent() == {}
    both[1].leave()
    assert list(both[0].absent()) == [1] and "left the program" in both[0].absent()[1]


def test_the_board_names_dead_ranks(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(os, "getpid", lambda: process.pid)  # these ranks are threads of a process that stays alive
        first, _ = boards(2)
        assert first.absent() == {}
        process.kill()
    reason = f"is dead (its process {process.pid} is gone)"
    assert first.absent() == {0: reason, 1: reason}


def test_texts_are_exchanged_whole_or_truncated():
    three = boards(3)
    got: list[Any] = [None] * 3
    texts = ["short", "é" * 400, "x" * 5000]

    def use(rank: int) -> None:
        got[rank] = three[rank].exchange_texts(texts[rank], lambda: None)

    together(use, 3)
    assert got[0] == got[1] == got[2]
    assert got[0][:2] == texts[:2]
    assert set(got[0][2]) == {"x"} and len(got[0][2]) > 900


class Asked(Exception):
    """Raised when a wait returns to Python."""


def ask() -> None:
    raise Asked


def test_an_interrupted_rank_does_not_count_as_arrived():
    """It had arrived before the others, which then took its published data for the data of their call."""
    three = boards(3)
    with pytest.raises(Asked):
        three[0].barrier(7, ask)
    three[0].fail()
    for board in three[1:]:
        for _ in range(2):
            with pytest.raises(Asked):
                board.barrier(7, ask)


def test_a_complete_barrier_ends_on_all_ranks():
    """A rank that completes it and is then interrupted must not delay ranks that see the end later."""
    three, gave_up, waiting = boards(3), threading.Event(), threading.Semaphore(0)
    ended = []

    def sleep() -> None:
        waiting.release()
        gave_up.wait(10)

    def use(rank: int) -> None:
        if rank == 0:
            for _ in range(2):
                waiting.acquire()
            ended.append(three[0].barrier(7, lambda: None))
            three[0].fail()
            gave_up.set()
            return
        ended.append(three[rank].barrier(7, sleep))
        with pytest.raises(Asked):
            three[rank].barrier(8, ask)

    together(use, 3)
    assert ended == [True] * 3
