"""Memory of a GPU that one process exports and another opens, without a collective."""

from __future__ import annotations

import json

import pytest

from commlib.errors import TransportError


def test_exported_memory_opens_in_its_own_process(gpu):
    runtime = gpu.cupy.cuda.runtime
    before = runtime.memGetInfo()[0]
    exported = gpu.device.export(100_000)
    assert runtime.memGetInfo()[0] < before
    opened = gpu.device.open(exported.handle)
    assert opened.address == exported.address
    x = gpu.device.at(opened.address, (1000,), "float32", opened)
    gpu.fill(x, 3)
    assert (gpu.fetch(x) == 3).all()
    for _ in range(2):
        opened.close()
        exported.free()
    assert runtime.memGetInfo()[0] == before


def test_an_allocation_error_is_reported(gpu, monkeypatch):
    runtime = gpu.cupy.cuda.runtime

    def too_little(size):
        raise runtime.CUDARuntimeError(2)

    monkeypatch.setattr(runtime, "malloc", too_little)
    with pytest.raises(TransportError, match="cannot make 4000 bytes on GPU 0 for another process"):
        gpu.device.export(4000)


def test_an_open_error_is_reported(gpu, monkeypatch):
    runtime = gpu.cupy.cuda.runtime
    exported = gpu.device.export(4000)
    process, *rest = json.loads(exported.handle)

    def refused(handle, *flags):
        raise runtime.CUDARuntimeError(101)

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", refused)
    with pytest.raises(TransportError, match=rf"cannot open memory of process {process + 1} on GPU 0"):
        gpu.device.open(json.dumps([process + 1, *rest]))
    exported.free()
