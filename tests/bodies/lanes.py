"""Lane checks: test messages between two ranks of a node, either processes under MPI or threads."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from commlib.errors import MismatchError, StallError, UsageError
from tests.oracles.poison import poisoned

# Numbers of int64: none, within a cache line, in several, near and beyond the most that a lane carries itself.
COUNTS = [0, 1, 4, 5, 100, 2000, 8191, 8192, 8193, 30_000, 200_000]


def pair(comm: Any) -> bool:
    """Return whether this rank is one of the two; `1 - comm.rank` is then the other one."""
    return bool(comm.rank < 2)


def numbers(count: int, step: int) -> Any:
    return np.arange(step, step + count)


def order_within_a_tag(comm: Any) -> None:
    """Small messages never overtake large ones, nor large ones small ones."""
    chance = random.Random(1)
    counts = [chance.choice(COUNTS) for _ in range(150)]
    if comm.rank == 0:
        for step, count in enumerate(counts):
            comm.send(numbers(count, step), 1, 3)
    elif comm.rank == 1:
        for step, count in enumerate(counts):
            received = comm.recv(np.zeros(count, int), 0, 3)
            assert (received == numbers(count, step)).all(), step
            if step % 40 == 0:
                time.sleep(0.02)


def tags_in_any_order(comm: Any) -> None:
    chance = random.Random(2)
    sent = [(chance.randrange(40), chance.choice(COUNTS)) for _ in range(300)]
    in_order = sorted(sent, key=lambda message: (message[0] * 7) % 40)  # stable: in order within a tag
    steps = sorted(range(300), key=lambda step: (sent[step][0] * 7) % 40)
    if comm.rank == 0:
        works = [comm.send_async(numbers(count, step), 1, tag) for step, (tag, count) in enumerate(sent)]
        for work in works:
            work.wait(60)
    elif comm.rank == 1:
        time.sleep(0.05)
        for step, (tag, count) in zip(steps, in_order, strict=True):
            assert (comm.recv(np.zeros(count, int), 0, tag) == numbers(count, step)).all(), (step, tag)


def exchanges(comm: Any) -> None:
    """Ranks send before they receive; errors are raised before anything is sent, or leave the lanes in step."""
    if not pair(comm):
        return
    chance, peer = random.Random(3), 1 - comm.rank
    for step in range(400):
        count = chance.choice(COUNTS)
        out = np.zeros(count, int)
        if step % 7 == comm.rank:  # unusual arrays take the other path
            out = np.zeros((count, 2), int)[:, 0]
        assert comm.send_recv(numbers(count, step + comm.rank), peer, out, peer, step % 3) is out
        assert (out == numbers(count, step + peer)).all(), step
        if step % 50 == 0:
            vector, locked = np.ones(4), np.zeros(4)
            locked.flags.writeable = False
            for x, target in (
                (vector, vector),
                (vector, vector[:2]),
                (vector, locked),
                ("text", np.zeros(4)),
                (vector, "text"),
            ):
                with pytest.raises(UsageError):
                    comm.send_recv(x, peer, target, peer)
            time.sleep(0.001 * chance.random() * (1 + comm.rank))
    with pytest.raises(MismatchError, match="expected 40 bytes, got 24"):
        comm.send_recv(np.ones(3), peer, np.ones(5), peer)
    with pytest.raises(StallError):
        comm.send_recv_async(np.ones(3), peer, np.ones(3), peer, 5 + comm.rank).wait(0.01)
    comm.send_recv(np.ones(3), peer, np.ones(3), peer)


def a_flood_before_the_first_receive(comm: Any) -> None:
    """No send waits, in either direction; then everything is received, the last tags first."""
    many = 10_000
    if not pair(comm):
        return
    peer = 1 - comm.rank
    for step in range(many):
        comm.send(numbers(1 + step % 60, step), peer, step % 3)
    comm.send_recv(np.zeros(1), peer, np.zeros(1), peer, 9)  # behind everything already sent
    for tag in (2, 0, 1):
        for step in range(tag, many, 3):
            got = comm.recv(np.zeros(1 + step % 60, int), peer, tag)
            assert got[0] == step and got[-1] == step + step % 60, (tag, step, got)


def receives_posted_before(comm: Any) -> None:
    """Each gets the earliest remaining message of its tag; a blocking one comes after them."""
    chance = random.Random(3)
    tags = [chance.randrange(5) for _ in range(120)]
    counts = [chance.choice(COUNTS[:-1]) for _ in tags]
    if comm.rank == 1:
        works = [
            comm.recv_async(poisoned(np.zeros(count, int)), 0, tag) for tag, count in zip(tags, counts, strict=True)
        ]
        gc.collect()
        comm.send(np.zeros(1), 0)
        assert [int(comm.recv(np.zeros(1, int), 0, tag)[0]) for tag in range(5)] == [-tag for tag in range(5)]
        for step, (work, count) in enumerate(zip(works, counts, strict=True)):
            assert (work.wait(60) == numbers(count, step)).all(), step
    elif comm.rank == 0:
        comm.recv(np.zeros(1), 1)
        for step, (tag, count) in enumerate(zip(tags, counts, strict=True)):
            comm.send(poisoned(numbers(count, step)), 1, tag)
        for tag in range(5):
            comm.send(np.array([-tag]), 1, tag)


def several_threads(comm: Any) -> None:
    """Each has a tag, and sends and receives at once; two more share one."""
    if not pair(comm):
        return
    peer, errors, seen = 1 - comm.rank, list[BaseException](), list[int]()

    def talk(tag: int) -> None:
        try:
            chance = random.Random(tag)
            for step in range(60):
                count = chance.choice(COUNTS[:-1])
                work = comm.send_async(numbers(count, step + tag), peer, tag)
                assert (comm.recv(np.zeros(count, int), peer, tag) == numbers(count, step + tag)).all()
                work.wait(60)
        except BaseException as error:
            errors.append(error)

    def share() -> None:
        try:
            for step in range(200):
                comm.send(np.array([step]), peer, 50)
                seen.append(int(comm.recv(np.zeros(1, int), peer, 50)[0]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    threads += [threading.Thread(target=share) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert sorted(seen) == sorted([*range(200), *range(200)])


def another_length(comm: Any) -> None:
    """It is named; the next message is correct."""
    for sent, in_order in ((2, 4), (6, 4), (0, 4), (4, 0), (9000, 4), (4, 9000), (9000, 8999), (30_000, 9000)):
        if comm.rank == 0:
            comm.send(np.ones(sent), 1)
            comm.send(np.full(3, sent), 1)
        elif comm.rank == 1:
            with pytest.raises(MismatchError, match=rf"recv from rank 0.*: expected {8 * in_order} bytes, got"):
                comm.recv(np.ones(in_order), 0)
            assert comm.recv(np.zeros(3, int), 0).tolist() == [sent] * 3


def waits_that_end(comm: Any) -> None:
    """A receive whose wait timed out can be waited for again."""
    if comm.rank == 1:
        work = comm.recv_async(np.zeros(1), 0, 5)
        with pytest.raises(StallError, match=r"recv from rank 0, tag 5: not done after 0.05 s"):
            work.wait(0.05)
        comm.send(np.zeros(1), 0)
        assert work.wait(60)[0] == 7
    elif comm.rank == 0:
        comm.recv(np.zeros(1), 1)
        comm.send(np.full(1, 7.0), 1, 5)


def memory_may_be_freed_at_once(comm: Any) -> None:
    for step in range(30):
        count = COUNTS[step % len(COUNTS)]
        if comm.rank == 0:
            comm.send(poisoned(numbers(count, step)), 1)
        elif comm.rank == 1:
            assert (comm.recv(poisoned(np.zeros(count, int)), 0) == numbers(count, step)).all()


def unreceived_messages_block_nothing(comm: Any) -> None:
    """Some messages among thousands wait, and are received last: rings did not fill up with them."""
    if comm.rank == 0:
        for step in range(4000):
            comm.send(numbers(20, step), 1, 99 if step % 50 == 0 else 0)
        comm.recv(np.zeros(1), 1)
    elif comm.rank == 1:
        for tag in (0, 99):
            for step in range(4000):
                if (step % 50 == 0) == (tag == 99):
                    assert (comm.recv(np.zeros(20, int), 0, tag) == numbers(20, step)).all()
        comm.send(np.zeros(1), 0)


def arrays_of_all_kinds(comm: Any) -> None:
    """With gaps, without a dimension, of another byte order or with a numpy scalar as tag: all work."""
    values: list[Any] = [np.arange(20)[::2], np.array(3.5), np.ones((3, 0, 2)), np.arange(6).reshape(2, 3).T]
    for x in values:
        if comm.rank == 0:
            comm.send(x, np.int64(1), np.int16(4))
            comm.send(x, 1, 4)
        elif comm.rank == 1:
            for _ in range(2):
                out = np.zeros_like(np.tile(x, 2))[..., : x.shape[-1]] if x.ndim else np.zeros_like(x)
                assert comm.recv(out, 0, 4) is out
                assert (out == x).all()


CHECKS = [
    exchanges,
    order_within_a_tag, tags_in_any_order, a_flood_before_the_first_receive, receives_posted_before, several_threads,
    another_length, waits_that_end, memory_may_be_freed_at_once, unreceived_messages_block_nothing, arrays_of_all_kinds,
]  # fmt: skip
