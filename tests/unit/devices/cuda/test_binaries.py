"""Kernels are compiled once for a kind of GPU, kept on disk, and never with options that change their results."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.devices.cuda.binaries import binary
from commlib.devices.cuda.launcher import CupyLauncher
from commlib.errors import TransportError
from commlib.kernels.cuda.sources import OPTIONS, expand_source

DEFINES = (*OPTIONS, "-DELEMENT=u32")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "commlib" / "cuda"


@pytest.fixture
def compilations(gpu, monkeypatch):
    """Return the options of all compilations by NVRTC."""
    recorded, compile = [], gpu.cupy.cuda.nvrtc.compileProgram

    def noting(prog, options):
        recorded.append(options)
        compile(prog, options)

    monkeypatch.setattr(gpu.cupy.cuda.nvrtc, "compileProgram", noting)
    return recorded


def test_a_kernel_is_compiled_once(gpu, cache, compilations):
    text = expand_source("fill.cu")
    path = binary(gpu.cupy, text, DEFINES, 90, "fill.cu")
    assert path == binary(gpu.cupy, text, DEFINES, 90, "fill.cu") and path.startswith(str(cache))
    assert compilations == [(*DEFINES, "-arch=sm_90")]
    binary(gpu.cupy, text, (*OPTIONS, "-DELEMENT=u8"), 90, "fill.cu")
    binary(gpu.cupy, text + "// another\n", DEFINES, 90, "fill.cu")
    assert len(compilations) == 3


def test_a_later_launcher_compiles_nothing(gpu, cache, compilations):
    x = gpu.device.empty((100,), "uint32")
    at, count = np.uint64(x.data.ptr), np.uint64(100)
    for value in (5, 6):
        launcher = CupyLauncher(gpu.device, gpu.cupy)
        launcher.launch("fill.cu", "fill", {"ELEMENT": "u32"}, 4, at, count, np.uint32(value))
        np.testing.assert_array_equal(gpu.fetch(x), value)
    launcher.launch("fill.cu", "fill", {"ELEMENT": "u32"}, 0, at, count, np.uint32(9))  # with no workers
    np.testing.assert_array_equal(gpu.fetch(x), 6)
    assert len(compilations) == 1


def test_without_a_cache_each_launcher_compiles(gpu, cache, compilations):
    cache.parent.mkdir()
    cache.write_text("a file is in the way")
    path = binary(gpu.cupy, expand_source("fill.cu"), DEFINES, 90, "fill.cu")
    assert not path.startswith(str(cache))
    gpu.cupy.RawModule(path=path).get_function("fill")


def test_binaries_that_others_can_change_are_ignored(gpu, cache, compilations):
    binary(gpu.cupy, expand_source("fill.cu"), DEFINES, 90, "fill.cu")
    cache.chmod(0o777)
    assert not binary(gpu.cupy, expand_source("fill.cu"), DEFINES, 90, "fill.cu").startswith(str(cache))
    assert len(compilations) == 2


def test_a_newer_gpu_gets_ptx(gpu, cache, monkeypatch):
    """It gets PTX for the newest architecture that NVRTC supports."""
    architectures = []
    nvrtc = gpu.cupy.cuda.nvrtc
    monkeypatch.setattr(nvrtc, "compileProgram", lambda prog, options: architectures.append(options[-1]))
    monkeypatch.setattr(nvrtc, "getPTX", lambda prog: b"ptx")
    path = binary(gpu.cupy, expand_source("fill.cu"), DEFINES, 250, "fill.cu")
    newest = max(int(arch) for arch in nvrtc.getSupportedArchs())
    assert architectures == [f"-arch=compute_{newest}"] and path.endswith(".ptx")


def test_errors_of_nvrtc_are_reported(gpu, cache):
    with pytest.raises(TransportError, match=r"(?s)does not compile odd.cu with .*no_such_type"):
        binary(gpu.cupy, "no_such_type x;\n", OPTIONS, 90, "odd.cu")
