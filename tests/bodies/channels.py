"""Channel checks: test every channel, on a node and between nodes. Both ranks of a pair run each function."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from commlib.dtypes import DTYPES, numpy_dtype
from commlib.errors import MismatchError, PeerError, ShutdownError, StallError, UsageError
from commlib.p2p.channels.send_queue import SendPoll
from tests.oracles.poison import poisoned


def values(dtype: Any, shape: Any, seed: int) -> Any:
    """Return an array of some numbers that this dtype can hold."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + seed) % 11).astype(numpy_dtype(dtype)).reshape(shape)


def same(view, expected):
    return view.shape == expected.shape and view.dtype == expected.dtype and bool((view == expected).all())


def synchronise(comm, peer):
    comm.send_recv(np.zeros(1), peer, np.zeros(1), peer, 99)


def every_dtype_and_shape(comm, peer):
    for dtype in DTYPES:
        for shape in ((), (0,), (1,), (5, 3), (0, 4), (70, 50)):
            with comm.channel(peer, f"{dtype} {shape}", shape, dtype) as channel:
                for step in range(5):
                    channel.send(values(dtype, shape, comm.rank + step))
                    view = channel.recv()
                    assert same(view, values(dtype, shape, peer + step))
                    channel.release(view)


def order_at_every_depth(comm, peer):
    """The slower side sets the pace; nothing is lost, doubled or overtaken."""
    chance = random.Random(comm.rank)
    for depth in (1, 2, 3, 4):
        channel = comm.channel(peer, depth, (3,), "int64", depth)
        for sender in (comm.rank, peer) if comm.rank < peer else (peer, comm.rank):
            for step in range(200):
                if chance.random() < 0.02:
                    time.sleep(0.002)
                if sender == comm.rank:
                    channel.send(np.full(3, step))
                else:
                    view = channel.recv()
                    assert view.tolist() == [step] * 3
                    channel.release(view)
        channel.close()


def both_directions_at_once(comm, peer):
    """Each side sends as many as fit before it receives any."""
    for depth in (1, 2, 4):
        channel = comm.channel(peer, "both", (100_000,), "float32", depth)
        for step in range(10):
            for number in range(depth):
                channel.send(np.full(100_000, step * 10 + number + comm.rank / 2, np.float32))
            views = [channel.recv() for _ in range(depth)]
            for number, view in enumerate(views):
                assert (view == step * 10 + number + peer / 2).all()
            for view in random.Random(step).sample(views, depth):
                channel.release(view)
        channel.close()


def edges_opened_in_different_orders(comm, peer):
    names = [0, 1, -5, "forward", "backward", "0"]
    order = names if comm.rank < peer else names[::-1]
    channels = {name: comm.channel(peer, name, (2,), "int32") for name in order}
    for name in order:
        channels[name].send(np.full(2, names.index(name), np.int32))
    for name in order:
        assert channels[name].recv().tolist() == [names.index(name)] * 2
    # One that is open on one side only keeps nobody waiting.
    late = [comm.channel(peer, "late", (2,), "int32")] if comm.rank < peer else []
    for name in order:
        channels[name].release()
        channels[name].send(np.full(2, 7, np.int32))
    for name in order:
        assert channels[name].recv()[0] == 7
    late = late or [comm.channel(peer, "late", (2,), "int32")]
    late[0].send(np.zeros(2, np.int32))
    assert late[0].recv().tolist() == [0, 0]
    for channel in (*channels.values(), *late):
        channel.close()


def shapes_that_change(comm, peer):
    chance = random.Random(5)
    shapes = [tuple(chance.randrange(0, 4 + step) for _ in range(chance.randrange(4))) for step in range(120)]
    shapes[60] = (700_000,)
    with comm.channel(peer, "shapes", (3,), "float64", 2) as channel:
        for step, shape in enumerate(shapes):
            channel.send(values("float64", shape, comm.rank + step))
            for number in (step - 1, step) if step % 2 else ():
                view = channel.recv()
                assert same(view, values("float64", shapes[number], peer + number))
                channel.release(view)


def views_stay_while_others_grow(comm, peer):
    with comm.channel(peer, "held", (4,), "int64", 4) as channel:
        for count in (4, 4000, 4, 400_000):
            channel.send(np.full(count, count + comm.rank))
        views = [channel.recv() for _ in range(4)]
        for view, count in zip(views, (4, 4000, 4, 400_000), strict=True):
            assert view.shape == (count,) and (view == count + peer).all()
        for view in views:
            channel.release(view[1:3])  # any part of it
        for _ in range(8):
            channel.send(np.zeros(4, np.int64))
            assert channel.recv().tolist() == [0] * 4
            channel.release()


def sources_may_be_freed_at_once(comm, peer):
    with comm.channel(peer, "sources", (50_000,), "float32") as channel:
        for step in range(8):
            channel.send(poisoned(np.full(50_000, step + comm.rank, np.float32)))
            channel.send(poisoned(np.full(5, step, np.float32)))
            assert (channel.recv() == step + peer).all() and (channel.recv() == step).all()
            channel.release()


def unreleased_messages(comm, peer):
    with comm.channel(peer, "held", (2,), "int64", 2) as channel:
        for step in range(2):
            channel.send(np.full(2, step))
        first, second = channel.recv(), channel.recv()
        with pytest.raises(UsageError, match=r"all 2 slots hold received messages"):
            channel.recv()
        assert first.tolist() == [0, 0] and second.tolist() == [1, 1]
        with pytest.raises(UsageError, match=r"not a received message of this channel"):
            channel.release(np.zeros(2, np.int64))
        channel.release(first)
        channel.send(np.full(2, 2))
        if comm.rank < peer:
            third = channel.recv()
            assert third.tolist() == [2, 2] and second.tolist() == [1, 1]
            first.sum(), first.fill(9)  # the memory remains valid, with the data of later messages
            channel.release(third)
        else:
            assert channel.recv().tolist() == [2, 2]
        channel.release()
        channel.release()


def written_in_place(comm, peer):
    with comm.channel(peer, "direct", (4, 5), "float32") as channel:
        for step in range(7):
            buffer = channel.buffer()
            assert buffer.shape == (4, 5) and buffer.dtype == np.float32
            buffer[...] = step + comm.rank
            channel.send(buffer)
            assert (channel.recv() == step + peer).all()
            channel.release()
        small = channel.buffer((2, 3))
        small[...] = 3
        channel.send(small)
        assert same(channel.recv(), np.full((2, 3), 3, np.float32))
        channel.release()
        for _ in range(2):
            large = channel.buffer((100, 70))  # the first is ordinary memory
            large[...] = 4
            channel.send(large)
            assert same(channel.recv(), np.full((100, 70), 4, np.float32))
            channel.release()
        channel.buffer(7000)[...] = 1  # borrowed, and something else is sent
        channel.send(np.full(7000, 2, np.float32))
        assert (channel.recv() == 2).all()
        channel.release()


def ready_before_it_is_received(comm, peer):
    """A message that was polled, received and released was once taken for the next one, a longer one."""
    with comm.channel(peer, "seen", (3,), "int32") as channel:
        for step in range(9):
            length = 3 if step % 3 else 2000 * (step + 1)
            channel.send(np.full(length, step + comm.rank, np.int32))
            while not channel.ready():
                time.sleep(0.001)
            assert same(channel.recv(), np.full(length, step + peer, np.int32))
            channel.release()


def share_memory(comm, peer):
    return comm.config.node_path and peer in comm.group.hierarchy.ranks


def sends_that_wait_for_room(comm, peer):
    with comm.channel(peer, "async", (1000,), "float64", 2) as channel:
        works = [channel.send_async(poisoned(np.full(1000, step + comm.rank, np.float64))) for step in range(9)]
        if comm.rank < peer and share_memory(comm, peer):
            with pytest.raises(StallError, match=r"not done after 0.05 s"):
                works[-1].wait(0.05)
        synchronise(comm, peer)
        for step in range(4):
            assert (channel.recv() == step + peer).all()
            channel.release()
        sender = threading.Thread(target=channel.send, args=(np.full(3, -1.0),))  # goes after them
        sender.start()
        for step in range(4, 9):
            assert (channel.recv() == step + peer).all()
            channel.release()
        assert channel.recv().tolist() == [-1] * 3
        channel.release()
        for work in works:
            assert work.wait(20) is None and work.done()
        sender.join(20)
        assert not sender.is_alive()


def sides_that_disagree(comm, peer):
    mine: dict[str, Any] = {"shape": (3,), "dtype": "float32", "depth": 2, "codec": None}
    for name, different in (("dtype", "float64"), ("depth", 3), ("shape", (4,)), ("codec", "int8")):
        terms = mine if comm.rank < peer else {**mine, name: different}
        channel = comm.channel(peer, f"disagree on {name}", **terms)
        with pytest.raises(MismatchError) as caught:
            channel.send(np.zeros(3, terms["dtype"])) if comm.rank < peer else channel.recv()
        text = str(caught.value)
        assert f"rank {comm.rank}: {'float32' if terms is mine else terms['dtype']}" in text
        assert f"rank {peer}: " in text and str(terms["depth"]) in text, text
        with pytest.raises(MismatchError):
            channel.recv()
        channel.close()
        with comm.channel(peer, f"disagree on {name}", (3,)) as reopened:
            reopened.send(np.ones(3, np.float32))
            assert reopened.recv().sum() == 3


def wrong_arguments(comm, peer):
    def refused(text, *arguments, **options):
        with pytest.raises(UsageError, match=text):
            comm.channel(*arguments, **options)

    refused(r"peer is \d", comm.rank, 0, (3,))
    refused("peer is", comm.size, 0, (3,))
    refused("edge is", peer, 1.5, (3,))
    refused("edge is a name of 0 characters", peer, "", (3,))
    refused("depth is 0", peer, 0, (3,), depth=0)
    refused("shape", peer, 0, (-3,))
    refused("at most 12 lengths", peer, 0, (1,) * 13)
    refused("dtype", peer, 0, (3,), "datetime64[s]")
    refused("codecs take", peer, 0, (3,), "int32", codec="int8")
    refused("payloads of variable length", peer, 0, (3,), codec="topk:ratio=0.1")
    refused("unknown codec", peer, 0, (3,), codec="zip")
    with comm.channel(peer, 0, (3,)) as channel:
        refused("is open on rank", peer, 0, (3,))
        with pytest.raises(UsageError, match=r"x is float64, but the channel was opened for float32"):
            channel.send(np.zeros(3))
        with pytest.raises(UsageError, match="expected an array"):
            channel.send([1.0, 2.0])
        channel.send(np.arange(6, dtype=np.float32)[::2])  # with gaps
        assert channel.recv().tolist() == [0, 2, 4]
        channel.release()
        channel.send(np.full(3, 5, np.float32).data)  # any host array
        assert channel.recv().tolist() == [5, 5, 5]
    with pytest.raises(UsageError, match="it was closed"):
        channel.recv()
    channel.close()


def encoded(comm, peer):
    wave = np.sin(np.arange(5000)).astype(np.float32)
    for codec, dtype, bound in (("int8", "float32", 0.02), ("fp16", "float64", 1e-3), ("int8", "bfloat16", 0.03)):
        with comm.channel(peer, f"{codec} {dtype}", (5000,), dtype, codec=codec) as channel:
            for count in (5000, 300, 20_000, 0, 5000):
                x = np.resize(wave, (count,)).astype(numpy_dtype(dtype))
                buffer = channel.buffer((count,))
                buffer[...] = x
                channel.send(buffer)
                channel.send(poisoned(x))
                views = [channel.recv(), channel.recv()]
                for view in views:
                    assert view.shape == (count,) and view.dtype == x.dtype
                    assert count == 0 or np.abs(view.astype(float) - x.astype(float)).max() <= bound
                for view in views:
                    channel.release(view)


def closed_by_the_other_side(comm, peer):
    """Messages that were sent before can still be received."""
    channel = comm.channel(peer, "closed", (3,), "int64", 2)
    channel.send(np.zeros(3, np.int64))
    channel.recv()
    channel.release()
    if comm.rank < peer:
        channel.send(np.ones(3, np.int64))
        channel.send(np.full(50_000, 2))
        channel.close()
    else:
        time.sleep(0.1)
        assert channel.recv()[0] == 1 and channel.recv().sum() == 100_000
        channel.release()
        for call in (channel.recv, lambda: [channel.send(np.zeros(3, np.int64)) for _ in range(4)]):
            with pytest.raises(PeerError, match=rf"rank {peer} has closed this channel") as caught:
                call()
            assert caught.value.missing == {peer: "has closed this channel"}
        channel.close()
    with comm.channel(peer, "closed", (3,)) as channel:  # and open it again
        channel.send(np.ones(3, np.float32))
        assert channel.recv().sum() == 3


def closed_before_all_is_received(comm, peer):
    """Nobody waits to send a message that the other side no longer wants."""
    with comm.channel(peer, "not taken", (3,)) as channel:
        if comm.rank < peer:
            channel.send(np.zeros(3000, np.float32))  # too long for the other side's memory: in memory of this side's
            synchronise(comm, peer)
            synchronise(comm, peer)
            assert comm.runtime.drain(5) == ""
        else:
            synchronise(comm, peer)
            channel.connection.connect("a test")
            channel.close()
            synchronise(comm, peer)


def interrupted_while_queued(comm, peer):
    """Whether it will be sent is unknown: the channel fails, and nobody waits for it."""
    with comm.channel(peer, "queued", (3,)) as channel:
        channel.connection.connect("a test")
        synchronise(
            comm, peer
        )  # both are connected: otherwise connect may already report that the other side has given up
        if comm.rank < peer:
            watch = comm.runtime.poller.watch

            def interrupted(work, *arguments, **options):
                if isinstance(work, SendPoll):
                    raise KeyboardInterrupt
                watch(work, *arguments, **options)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(comm.runtime.poller, "watch", interrupted)
                channel.queue.submit(lambda: np.zeros(3, np.float32))
            began = time.monotonic()
            channel.connection.flush(10)
            assert time.monotonic() - began < 5
            with pytest.raises(ShutdownError, match="ended half-way by KeyboardInterrupt"):
                channel.send(np.zeros(3, np.float32))
        else:
            with pytest.raises(PeerError, match="has given up this channel"):
                channel.recv()
        synchronise(comm, peer)


def waits_that_end(comm, peer):
    with comm.channel(peer, "waits", (3,), "int64", 1) as channel:
        assert not channel.ready()
        with pytest.raises(StallError, match=r"recv on channel 'waits' with rank \d: not done after 0.1 s"):
            channel.recv(timeout=0.1)
        synchronise(comm, peer)
        channel.send(np.full(3, 4))
        if share_memory(comm, peer):  # between nodes MPI may buffer short messages
            with pytest.raises(StallError):
                channel.send(np.full(3, 5), timeout=0.1)
        synchronise(comm, peer)
        while not channel.ready():
            time.sleep(1e-3)
        assert channel.recv(timeout=0)[0] == 4
        channel.release()


def threads_of_their_own(comm, peer):
    errors = []

    def send(channel):
        try:
            for step in range(300):
                channel.send(np.full(1 + step % 7, step))
        except BaseException as error:
            errors.append(error)

    with comm.channel(peer, "threads", (4,), "int64") as channel:
        thread = threading.Thread(target=send, args=(channel,))
        thread.start()
        for step in range(300):
            view = channel.recv()
            assert view.shape == (1 + step % 7,) and (view == step).all()
            channel.release(view)
        thread.join(20)
    assert not errors and not thread.is_alive()


def a_failed_group(group, peer):
    """Its channels fail on both sides."""
    channel = group.channel(peer, "group", (3,), "int64")
    channel.send(np.zeros(3, np.int64))
    channel.recv()
    channel.release()
    if group.rank < peer:
        group.group.abandon("a call", ValueError("out of luck"))
        with pytest.raises(ShutdownError, match="ended half-way by ValueError"):
            channel.send(np.zeros(3, np.int64))
        with pytest.raises(ShutdownError, match="ended half-way by ValueError"):
            group.channel(peer, "another", (3,))
    else:
        with pytest.raises(PeerError, match=r"has given up this group \(ShutdownError: .*ended half-way by ValueError"):
            channel.recv()


ALL = [
    every_dtype_and_shape, order_at_every_depth, both_directions_at_once, edges_opened_in_different_orders,
    shapes_that_change, views_stay_while_others_grow, sources_may_be_freed_at_once, unreleased_messages,
    written_in_place, ready_before_it_is_received, sends_that_wait_for_room, sides_that_disagree, wrong_arguments,
    encoded, closed_by_the_other_side, closed_before_all_is_received, interrupted_while_queued, waits_that_end,
    threads_of_their_own,
]  # fmt: skip
