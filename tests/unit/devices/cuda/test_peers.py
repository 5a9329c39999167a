"""Memory that two processes share on a GPU: when each of them may free it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from commlib.devices.cuda import peers
from commlib.errors import TransportError
from tests.cuda.peer import Peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer_ = Peer()
    yield peer_
    peer_.end()
    peers.sweep()


@pytest.fixture
def free(gpu):
    """Return a function that gives the free memory of the GPU."""
    return lambda: gpu.cupy.cuda.runtime.memGetInfo()[0]


def share(gpu, peer):
    peer.send("share")
    memory = gpu.device.share(4000, 0, peer.gather)
    assert peer.receive() == "shared"
    return memory


def test_shared_memory_is_zero_and_shows_the_peers_writes(gpu, peer):
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


def test_memory_is_freed_after_all_peers_closed_it(gpu, peer, free):
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


def test_memory_is_freed_after_a_peer_died(gpu, peer, free):
    before = free()
    memory = share(gpu, peer)
    peer.end()
    memory.close()
    peers.sweep()
    assert free() == before


def test_arrays_may_outlive_their_memory_object(gpu, peer, free):
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


def test_an_allocation_error_is_raised_on_all_ranks(gpu, peer, free, monkeypatch):
    before, runtime = free(), gpu.cupy.cuda.runtime

    def too_little(size):
        raise runtime.CUDARuntimeError(2)

    monkeypatch.setattr(runtime, "malloc", too_little)
    peer.send("share")
    with pytest.raises(
        TransportError, match=r"cannot make 4000 bytes.*rank 0 of the node, GPU 0.*CUDA_VISIBLE_DEVICES"
    ):
        gpu.device.share(4000, 0, peer.gather)
    peer.send(None)  # they synchronise before anything is freed
    assert "rank 0 of the node" in read_error(peer)
    assert free() == before


def test_an_open_error_is_raised_on_all_ranks(gpu, peer, free, monkeypatch):
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
    share(gpu, peer).close()  # a later attempt may succeed


def read_error(peer):
    while not isinstance(answer := peer.receive(), str):
        pass
    return answer
