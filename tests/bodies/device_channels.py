"""Device channel checks: test channels whose arrays are on a device. Both ranks of a pair run each function.

place: puts arrays on the device and fetches them (`put`, `fetch`); device: the core's. A forgotten wait shows as poison
on the late device and on CuPy's stand-in.
"""

from __future__ import annotations

import gc
import random
import resource
import subprocess
import threading
import time
from typing import Any

import numpy as np
import pytest

from commlib.dtypes import DTYPES
from commlib.errors import CommlibError, MismatchError, PeerError, StallError, UsageError
from commlib.p2p.device import edge as device_edge
from tests.bodies.channels import synchronise, values


def same(place: Any, array: Any, expected: Any) -> None:
    actual = place.fetch(array)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


def every_dtype_and_shape(comm, peer, place, device):
    for dtype in DTYPES:
        with comm.channel(peer, str(dtype), (5, 3), dtype, device=device) as channel:
            for step, shape in enumerate(((5, 3), (), (0,), (1,), (0, 4), (70, 50), (5, 3))):
                channel.send(place.put(values(dtype, shape, comm.rank + step)))
                view = channel.recv()
                same(place, view, values(dtype, shape, peer + step))
                channel.release(view)


def many_messages_one_way_at_a_time(comm, peer, place, device):
    chance = random.Random(comm.rank)
    for depth in (1, 4):
        channel = comm.channel(peer, depth, (300,), "float32", depth, device=device)
        for sender in sorted((comm.rank, peer)):
            for step in range(60):
                if chance.random() < 0.05:
                    time.sleep(0.002)
                if sender == comm.rank:
                    channel.send(place.put(np.full(300, step, np.float32)))
                else:
                    view = channel.recv()
                    same(place, view, np.full(300, step, np.float32))
                    channel.release(view)
        channel.close()


def both_directions_at_once(comm, peer, place, device):
    """Each side sends as many as fit before it receives any; they are released in another order."""
    for depth in (1, 4):
        channel = comm.channel(peer, "both", (20_000,), "float32", depth, device=device)
        for step in range(6):
            for number in range(depth):
                channel.send(place.put(np.full(20_000, 10 * step + number + comm.rank / 2, np.float32)))
            views = [channel.recv() for _ in range(depth)]
            for number, view in enumerate(views):
                same(place, view, np.full(20_000, 10 * step + number + peer / 2, np.float32))
            for view in random.Random(step).sample(views, depth):
                channel.release(view)
        channel.close()


def shapes_that_change(comm, peer, place, device):
    """Memory grows while earlier messages are still in the old one."""
    chance = random.Random(5)
    shapes = [tuple(chance.randrange(0, 4 + step) for _ in range(chance.randrange(4))) for step in range(40)]
    shapes[20] = (90_000,)
    for depth in (2, 4):
        with comm.channel(peer, f"shapes {depth}", (3,), "float64", depth, device=device) as channel:
            for step, shape in enumerate(shapes):
                channel.send(place.put(values("float64", shape, comm.rank + step)))
                for number in (step - 1, step) if step % 2 else ():
                    view = channel.recv()
                    same(place, view, values("float64", shapes[number], peer + number))
                    channel.release(view)


def sources_may_be_freed_at_once(comm, peer, place, device):
    """Sent arrays are overwritten and freed, received ones are dropped, while all are in flight."""
    with comm.channel(peer, "sources", (5000,), "float32", 4, device=device) as channel:
        for step in range(8):
            views = []
            for number in range(4):
                x = place.put(np.full(5000, step + number + comm.rank, np.float32))
                channel.send(x) if number % 2 else channel.send_async(x)
                device.kernels.fill(device.wrap(x, "x"), 0)
                del x
            for _ in range(4):
                views.append(channel.recv())
                channel.release(views[-1])
            for _ in range(2):
                device.empty((5000,), "float32")
            for number, view in enumerate(views):
                same(place, view, np.full(5000, step + number + peer, np.float32))
            views.clear()
            channel.send(place.put(np.zeros(3, np.float32)))
            channel.recv()  # nobody reads it
            channel.release()


def released_before_it_is_read(comm, peer, place, device):
    """The receiver's stream is far behind its host: the sender's stream waits for it, and its host does not."""
    with comm.channel(peer, "behind", (4000,), "float32", 2, device=device) as channel:
        busy = device.wrap(place.put(np.ones(10, np.float32)), "busy")
        views = []
        for step in range(12):
            if comm.rank < peer:
                channel.send(place.put(np.full(4000, step, np.float32)))
                continue
            for _ in range(10):
                device.kernels.scale(busy, 1)
            views.append(channel.recv())
            channel.release()
        for step, view in enumerate(views):
            same(place, view, np.full(4000, step, np.float32))
        synchronise(comm, peer)


def streams_of_their_own(comm, peer, place, device):
    """Messages of several streams of each side: the later one may be written, and read, first."""
    streams = [device.stream() for _ in range(3)]
    with comm.channel(peer, "streams", (4000,), "float32", 3, device=device) as channel:
        for step in range(10):
            for number, stream in enumerate(streams):
                with device.using(stream):
                    x = place.put(np.full(4000, 3 * step + number + comm.rank, np.float32))
                    for _ in range((number + step) % 3):
                        device.kernels.scale(device.wrap(x, "x"), 1)
                    channel.send(x)
            views = []
            for stream in streams[::-1]:
                with device.using(stream):
                    views.append(channel.recv())
            for number, stream in enumerate(streams[::-1]):
                with device.using(stream):
                    same(place, views[number], np.full(4000, 3 * step + number + peer, np.float32))
            channel.release()


def written_in_place(comm, peer, place, device):
    with comm.channel(peer, "direct", (4, 5), "float32", device=device) as channel:
        for step in range(7):
            buffer = channel.buffer()
            wrapped = device.wrap(buffer, "buffer")
            assert wrapped.shape == (4, 5) and wrapped.dtype == np.float32
            device.copy(wrapped, device.wrap(place.put(np.full((4, 5), step + comm.rank, np.float32)), "x"))
            channel.send(buffer)
            same(place, channel.recv(), np.full((4, 5), step + peer, np.float32))
            channel.release()
        for shape in ((2, 3), (100, 70), 7000, (2, 3)):
            buffer = channel.buffer(shape)
            device.kernels.fill(device.wrap(buffer, "buffer").reshape(-1), 3)
            channel.send(buffer)
            view = channel.recv()
            same(place, view, np.full(shape, 3, np.float32))
            channel.release(view)
        device.kernels.fill(device.wrap(channel.buffer(7000), "buffer"), 1)  # borrowed, and something else is sent
        channel.send(place.put(np.full(7000, 2, np.float32)))
        same(place, channel.recv(), np.full(7000, 2, np.float32))
        channel.release()


def unreleased_messages(comm, peer, place, device):
    with comm.channel(peer, "held", (2,), "int64", 2, device=device) as channel:
        for step in range(2):
            channel.send(place.put(np.full(2, step)))
        first, second = channel.recv(), channel.recv()
        with pytest.raises(UsageError, match=r"all 2 slots hold received messages"):
            channel.recv()
        with pytest.raises(UsageError, match=r"not a received message of this channel"):
            channel.release(place.put(np.zeros(2, np.int64)))
        with pytest.raises(UsageError, match=r"not a received message of this channel"):
            channel.release(np.zeros(2, np.int64))
        channel.release(first)
        with pytest.raises(UsageError, match=r"not a received message of this channel"):
            channel.release(first)
        channel.send(place.put(np.full(2, 2)))
        third = channel.recv()
        same(place, first, np.full(2, 0))  # as long as it is referenced
        same(place, second, np.full(2, 1))
        same(place, third, np.full(2, 2))
        channel.release(third[1:])  # any part of it
        channel.release()
        channel.release()


def tags_and_notes(comm, peer, place, device):
    with comm.channel(peer, "notes", (3,), "int32", 3, device=device) as channel:
        notes = [b"", b"of stage 3", b"x" * 10_000]
        for step, note in enumerate(notes):
            channel.send(place.put(np.full(3, step, np.int32)), tag=step << 30, note=note)
        for step, note in enumerate(notes):
            message = channel.recv_message()
            assert (message.tag, message.note) == (step << 30, note)
            same(place, message.array, np.full(3, step, np.int32))
        channel.release()
        with pytest.raises(UsageError, match=r"tag is -1, expected 0 to"):
            channel.send(place.put(np.zeros(3, np.int32)), tag=-1)
        synchronise(comm, peer)


def sends_that_wait_for_room(comm, peer, place, device):
    with comm.channel(peer, "async", (1000,), "float64", 2, device=device) as channel:
        works = [channel.send_async(place.put(np.full(1000, step + comm.rank / 2))) for step in range(7)]
        for step in range(7):
            same(place, channel.recv(), np.full(1000, step + peer / 2))
            channel.release()
        for work in works:
            work.wait(20)
        channel.send(place.put(np.full(3, 7.0)))
        same(place, channel.recv(), np.full(3, 7.0))
        channel.release()


def waits_that_end(comm, peer, place, device):
    with comm.channel(peer, "waits", (3,), "int64", 1, device=device) as channel:
        assert not channel.ready()
        with pytest.raises(StallError, match=r"recv on channel 'waits' with rank \d: not done after 0.1 s"):
            channel.recv(timeout=0.1)
        synchronise(comm, peer)
        channel.send(place.put(np.full(3, 4)))
        while not channel.ready():
            time.sleep(1e-3)
        if channel.is_direct:  # otherwise the host may buffer short messages
            with pytest.raises(StallError):
                channel.send(place.put(np.full(3, 5)), timeout=0.1)
            with pytest.raises(StallError):
                channel.buffer(3, timeout=0.1)
        synchronise(comm, peer)
        same(place, channel.recv(timeout=0), np.full(3, 4))
        channel.release()
        synchronise(comm, peer)
        channel.send(place.put(np.full(3, 6)))
        same(place, channel.recv(), np.full(3, 6))
        channel.release()


def sides_that_disagree(comm, peer, place, device):
    ways: list[dict[str, Any]] = [{"device": device}, {}]
    channel = comm.channel(peer, "odd", (3,), **ways[comm.rank > peer])
    with pytest.raises(MismatchError, match=r"float32, shape \(3,\), depth 2, codec none, device") as caught:
        channel.recv()
    assert f"rank {peer}: float32" in str(caught.value)
    with pytest.raises(MismatchError):
        channel.send(place.put(np.zeros(3, np.float32)) if comm.rank < peer else np.zeros(3, np.float32))
    synchronise(comm, peer)
    channel.close()
    channel = comm.channel(peer, "odder", (3,), "float32", 2 + (comm.rank > peer), device=device)
    with pytest.raises(MismatchError, match="depth 3"):
        channel.send(place.put(np.zeros(3, np.float32)))
    synchronise(comm, peer)
    channel.close()


def wrong_arguments(comm, peer, place, device):
    with pytest.raises(UsageError, match="codec= supports only host arrays"):
        comm.channel(peer, "coded", (3,), codec="int8", device=device)
    with pytest.raises(UsageError, match="a device of kind 'abacus'"):
        comm.channel(peer, "abacus", (3,), device="abacus")
    with comm.channel(peer, "wrong", (3,), device=device.name) as channel:
        with pytest.raises(UsageError, match="x is on host, but the channel was opened for device"):
            channel.send(np.zeros(3, np.float32))
        with pytest.raises(UsageError, match="x is float64, but the channel was opened for float32"):
            channel.send(place.put(np.zeros(3)))
        with pytest.raises(UsageError, match="13 dimensions, expected at most 12"):
            channel.send(place.put(np.zeros((1,) * 13, np.float32)))
        channel.send(place.put(np.ones(3, np.float32)))
        same(place, channel.recv(), np.ones(3, np.float32))
        channel.release()
        synchronise(comm, peer)


def closed_by_the_other_side(comm, peer, place, device):
    """Messages that were sent before are received, even if their memory is not open yet."""
    channel = comm.channel(peer, "closed", (3,), "int64", 3, device=device)
    channel.send(place.put(np.full(3, 1)))
    channel.recv()
    channel.release()
    if comm.rank < peer:
        channel.send(place.put(np.full(3, 2)))
        channel.send(place.put(np.ones(50_000, np.int64)))
        channel.close()
        with pytest.raises(UsageError, match=r"it was closed on rank \d"):
            channel.send(place.put(np.zeros(3, np.int64)))
    else:
        time.sleep(0.1)
        same(place, channel.recv(), np.full(3, 2))
        same(place, channel.recv(), np.ones(50_000, np.int64))
        channel.release()
        for call in (channel.recv, lambda: [channel.send(place.put(np.zeros(3, np.int64))) for _ in range(9)]):
            with pytest.raises(PeerError, match=rf"rank {peer} has closed this channel") as caught:
                call()
            assert caught.value.missing == {peer: "has closed this channel"}
        channel.close()
    with comm.channel(peer, "closed", (3,), device=device) as channel:  # and open it again
        channel.send(place.put(np.ones(3, np.float32)))
        same(place, channel.recv(), np.ones(3, np.float32))


def broken(*args: Any) -> None:
    raise ValueError("out of luck")


def one_side_raises(comm, peer, place, device, monkeypatch):
    """An error half-way through a send ends the channel on both sides; earlier messages are correct."""
    channel = comm.channel(peer, "raises", (3,), "int64", 2, device=device)
    channel.send(place.put(np.full(3, 1)))
    same(place, channel.recv(), np.full(3, 1))
    channel.release()
    if comm.rank < peer:
        channel.send(place.put(np.full(3, 2)))
        x, is_direct = place.put(np.full(3, 3)), channel.is_direct
        with monkeypatch.context() as patch:
            patch.setattr(type(device), "copy", broken)
            with pytest.raises(ValueError, match="out of luck") as caught:
                channel.send(x)
        if is_direct:
            assert "the other rank is notified" in "".join(caught.value.__notes__)
            with pytest.raises(CommlibError, match="ended half-way by ValueError"):
                channel.recv()
        else:
            channel.close("has given up this channel (ValueError)")
    else:
        same(place, channel.recv(), np.full(3, 2))
        channel.release()
        with pytest.raises(PeerError, match=rf"rank {peer} has given up this channel .*ValueError"):
            channel.recv()
    synchronise(comm, peer)
    channel.close()


def threads_of_their_own(comm, peer, place, device):
    errors = []

    def send(channel):
        try:
            with device.using(device.stream()):
                for step in range(40):
                    channel.send(place.put(np.full(1 + step % 7, step)))
        except BaseException as error:
            errors.append(error)

    with comm.channel(peer, "threads", (4,), "int64", device=device) as channel:
        thread = threading.Thread(target=send, args=(channel,))
        thread.start()
        for step in range(40):
            view = channel.recv()
            same(place, view, np.full(1 + step % 7, step))
            channel.release(view)
        thread.join(20)
    assert not errors and not thread.is_alive()


def nothing_grows(comm, peer, place, device, messages=2000):
    pages = 0
    with comm.channel(peer, "long", (2000,), "float32", 3, device=device) as channel:
        x = place.put(np.full(2000, comm.rank, np.float32))
        for step in range(messages):
            channel.send(x)
            view = channel.recv()
            channel.release(view)
            if step % 200 == 0:
                same(place, view, np.full(2000, peer, np.float32))
            if step == messages // 3:
                gc.collect()
                pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        same(place, view, np.full(2000, peer, np.float32))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - pages < 24 << 10  # KiB; all messages are 16 MB


def a_stream_waits_in_vain(comm, peer, place, device, monkeypatch):
    """The other process is dead, and its stream never sent a message: this one's is released, and the rank is named."""
    channel = comm.channel(peer, "vain", (3,), device=device)
    assert channel.is_direct
    channel.send(place.put(np.ones(3, np.float32)))
    same(place, channel.recv(), np.ones(3, np.float32))
    channel.release()
    synchronise(comm, peer)
    out = channel.ends.device.outgoing
    if comm.rank > peer:
        with monkeypatch.context() as patch:
            patch.setattr(out, "put", lambda x: "")  # the host has announced it
            channel.send(place.put(np.ones(3, np.float32)))
        comm.recv(np.zeros(1), peer, 98)
        channel.close()  # it is alive, really, and has memory open that the other one frees
    else:
        dead = subprocess.Popen(["true"])
        dead.wait()
        view = channel.recv()
        channel.ends.device.peer.identify(dead.pid)
        place.fetch(view)  # whatever it is
        with pytest.raises(PeerError, match=rf"lost rank {peer}: the process of the other rank is gone") as caught:
            channel.recv()
        assert caught.value.missing == {peer: "the process of the other rank is gone"}
        comm.send(np.zeros(1), peer, 98)
    synchronise(comm, peer)
    channel.close()


def a_failed_channel_releases_streams(comm, peer, place, device, monkeypatch):
    """The device is broken on the other side, but only after a while."""
    monkeypatch.setattr(device_edge, "PATIENCE", 0.2)
    channel = comm.channel(peer, "broken", (3,), device=device)
    assert channel.is_direct
    channel.send(place.put(np.ones(3, np.float32)))
    same(place, channel.recv(), np.ones(3, np.float32))
    channel.release()
    synchronise(comm, peer)
    if comm.rank > peer:
        with monkeypatch.context() as patch:
            patch.setattr(channel.ends.device.outgoing, "put", lambda x: "")
            channel.send(place.put(np.ones(3, np.float32)))
            patch.setattr(channel.ends.device.outgoing, "put", broken)
            with pytest.raises(ValueError, match="out of luck"):
                channel.send(place.put(np.ones(3, np.float32)))
    else:
        place.fetch(channel.recv())  # whatever it is
        with pytest.raises(PeerError, match=rf"lost rank {peer}: the channel has failed, and its streams did not end"):
            channel.recv()
    synchronise(comm, peer)
    channel.close()


def memory_is_freed(comm, peer, place, device, free):
    """free: returns the device's free memory."""

    def make_and_drop(times):
        for time_number in range(times):
            with comm.channel(peer, f"memory {time_number}", (3,), "float32", 2, device=device) as channel:
                for count in (3, 250_000, 500_000):
                    channel.send(place.put(np.full(count, comm.rank, np.float32)))
                    view = channel.recv()
                    same(place, view, np.full(count, peer, np.float32))
                    channel.release(view)
                    del view
                synchronise(comm, peer)

    make_and_drop(2)
    synchronise(comm, peer)
    before = free()
    synchronise(comm, peer)
    make_and_drop(10)
    synchronise(comm, peer)
    deadline = time.monotonic() + 10
    while (available := free()) < before - (
        8 << 20
    ) and time.monotonic() < deadline:  # one of them has 7 MB on each side
        with comm.channel(peer, "look", (3,), "float32", device=device):  # which looks at lingering memory
            time.sleep(0.05)
    synchronise(comm, peer)
    assert available >= before - (8 << 20)


ALL = [
    every_dtype_and_shape, many_messages_one_way_at_a_time, both_directions_at_once, shapes_that_change,
    sources_may_be_freed_at_once, released_before_it_is_read, streams_of_their_own, written_in_place,
    unreleased_messages, tags_and_notes, sends_that_wait_for_room, waits_that_end, sides_that_disagree,
    wrong_arguments, closed_by_the_other_side, threads_of_their_own, nothing_grows,
]  # fmt: skip
