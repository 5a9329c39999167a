"""Memory that two processes share on a GPU: who may free it, and when."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from commlib.devices.cuda import peers
from commlib.errors import TransportError
from tests.cuda.peer import Peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.end()
    peers.sweep()


@pytest.fixture
def free(gpu):
    """Return what tells how much memory the GPU has."""
    return lambda: gpu.cupy.cuda.runtime.memGetInfo()[0]


def share(gpu, peer):
    peer.send("share")
    memory = gpu.device.share(4000, 0, peer.gather)
    assert peer.receive() == "shared"
    return memory


def test_it_is_zero_and_another_processs_is_seen(gpu, peer):
    memory = share(gpu, peer)
    assert len(memory.bases) == 2 and memory.nbytes == 4000
    for base in memory.bases:
        x = gpu.device.at(base, (1000,), np.dtype(np.float32), memory)
        np.testing.assert_array_equal(gpu.fetch(x), 0)
        gpu.fill(x, 3)
        np.testing.assert_array_equal(gpu.fetch(x), 3)
    memory.close()
    peer.send("close")
    assert peer.receive() == "closed"


def test_it_is_freed_when_the_others_have_closed_it(gpu, peer, free):
    before = free()
    memory = share(gpu, peer)
    assert free() < before
    memory.close()
    peers.sweep()
    assert free() < before  # the other one still has it open
    peer.send("close")
    assert peer.receive() == "closed"
    peers.sweep()
    assert free() == before


def test_it_is_freed_when_a_process_that_had_it_open_is_gone(gpu, peer, free):
    before = free()
    memory = share(gpu, peer)
    peer.end()
    memory.close()
    peers.sweep()
    assert free() == before


def test_arrays_may_outlive_whoever_made_it(gpu, peer, free):
    before = free()
    memory = share(gpu, peer)
    x = gpu.device.at(memory.bases[0], (1000,), np.dtype(np.float32), memory)
    del memory
    peer.send("close")
    assert peer.receive() == "closed"
    np.testing.assert_array_equal(gpu.fetch(x), 0)
    assert free() < before
    del x
    peers.sweep()
    assert free() == before


def test_what_one_rank_cannot_make_all_are_told(gpu, peer, free, monkeypatch):
    before, runtime = free(), gpu.cupy.cuda.runtime

    def too_little(size):
        raise runtime.CUDARuntimeError(2)

    monkeypatch.setattr(runtime, "malloc", too_little)
    peer.send("share")
    with pytest.raises(
        TransportError, match=r"cannot make 4000 bytes.*rank 0 of the node, GPU 0.*CUDA_VISIBLE_DEVICES"
    ):
        gpu.device.share(4000, 0, peer.gather)
    peer.send(None)  # they meet before anything is freed
    assert "rank 0 of the node" in read_error(peer)
    assert free() == before


def test_what_one_rank_cannot_open_all_are_told(gpu, peer, free, monkeypatch):
    before, runtime = free(), gpu.cupy.cuda.runtime

    def refused(handle, *flags):
        raise runtime.CUDARuntimeError(101)

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", refused)
    peer.send("share")
    with pytest.raises(TransportError, match=r"cannot open 4000 bytes.*rank 0 of the node"):
        gpu.device.share(4000, 0, peer.gather)
    peer.send(None)
    assert "cannot open" in read_error(peer)
    monkeypatch.undo()
    assert free() == before
    share(gpu, peer).close()  # and it may go well the next time


def read_error(peer):
    while not isinstance(told := peer.receive(), str):
        pass
    return told
