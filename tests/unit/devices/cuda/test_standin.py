"""CuPy's stand-in has CuPy's names and arguments; the driver's operation matches the layout in the driver's header."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest

from commlib.devices.cuda import signals
from tests.cuda import build, standin

# The attributes of classes that commlib uses; `late` and `peek` exist only in the stand-in.
CLASSES = {
    "Device": ("use", "__enter__", "__exit__", "compute_capability"),
    "Event": ("record", "synchronize", "done"),
    "Stream": ("record", "wait_event", "synchronize", "__enter__", "__exit__", "null", "from_external"),
    "MemoryPointer": ("device_id", "ptr", "mem"),
    "UnownedMemory": (),
}
NVRTC = (
    "createProgram", "compileProgram", "getCUBIN", "getPTX", "destroyProgram", "getVersion", "getSupportedArchs",
)  # fmt: skip
DRIVER = ("launchKernel", "occupancyMaxActiveBlocksPerMultiprocessor")
FUNCTIONS = ("alloc", "alloc_pinned_memory", "get_current_stream")

PROGRAM = """
import cupy, json, sys
from cupy.cuda import runtime
found = {{}}
for name in {functions}:
    found[name] = getattr(cupy.cuda, name).__doc__
for name in {runtime}:
    value = getattr(runtime, name)
    found["runtime." + name] = value if isinstance(value, int) else value.__doc__ if callable(value) else None
for name, members in {classes}.items():
    kind = getattr(cupy.cuda, name)
    found["class " + name] = all(hasattr(kind, member) for member in members)
found["ndarray"] = all(hasattr(cupy.ndarray, name) for name in ("data", "flags", "shape", "dtype", "get"))
for name in {nvrtc}:
    found["nvrtc." + name] = getattr(cupy.cuda.nvrtc, name).__doc__
for name in {driver}:
    found["driver." + name] = getattr(cupy.cuda.driver, name).__doc__
found["RawModule"] = cupy.RawModule.__doc__
found["kernel"] = hasattr(cupy.RawKernel, "kernel") and hasattr(cupy.cuda.Function, "ptr")
found["pool"] = all(
    hasattr(cupy.cuda.MemoryPool, name) for name in ("used_bytes", "total_bytes", "set_limit", "free_all_blocks")
)
found["errors"] = issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError) and issubclass(
    runtime.CUDARuntimeError, RuntimeError
)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def real():
    """Return the names and signatures of the real CuPy, from this interpreter or the one in GPU_TEST_CUPY."""
    installed = PathFinder.find_spec("cupy") is not None  # also with the stand-in in this process
    python = os.environ.get("GPU_TEST_CUPY", sys.executable if installed else "")
    if not python:
        pytest.skip("CuPy is not installed, and GPU_TEST_CUPY names no interpreter that has it")
    names = [name for name in vars(standin.runtime) if name != "CUDARuntimeError"]
    program = PROGRAM.format(nvrtc=NVRTC, driver=DRIVER, functions=FUNCTIONS, runtime=names, classes=CLASSES)
    done = subprocess.run([python, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    import json

    return json.loads(done.stdout.splitlines()[-1])


def arguments(signature: str) -> list[str]:
    """Return the names of a function's arguments from the first line of its documentation: "name(type x, y=1)"."""
    inside = re.match(r"\w+\((.*)\)", signature.splitlines()[0])
    assert inside, signature
    return [each.split("=")[0].split(":")[0].split()[-1] for each in inside[1].split(",") if each.strip()]


def test_functions_match_cupys_arguments(real):
    for name, documented in real.items():
        if name.startswith("runtime.") and isinstance(documented, str):
            ours = getattr(standin.runtime, name.removeprefix("runtime."))
        elif name.startswith("nvrtc."):
            ours = getattr(standin.Nvrtc, name.removeprefix("nvrtc."))
        elif name in FUNCTIONS:
            ours = getattr(standin, name)
        elif name.startswith("driver."):
            ours = getattr(standin.driver, name.removeprefix("driver."))
        else:
            continue
        assert list(inspect.signature(ours).parameters) == arguments(documented), name


def test_names_and_constants_match_cupys(real):
    for name, documented in real.items():
        if name.startswith("runtime.") and isinstance(documented, int):
            assert getattr(standin.runtime, name.removeprefix("runtime.")) == documented, name
    assert all(real[name] for name in (*(f"class {kind}" for kind in CLASSES), "ndarray", "pool", "errors", "kernel"))
    assert "str path=None" in real["RawModule"]


HEADER = next(
    (path for path in map(Path, ("/usr/local/cuda/include/cuda.h", "/usr/include/cuda.h")) if path.exists()), None
)


@pytest.mark.skipif(HEADER is None, reason="there is no cuda.h")
def test_the_drivers_operation_matches_the_header(tmp_path):
    names = ("operation", "address", "value", "flags")
    code = f"""
    #include <cuda.h>
    #include <stddef.h>
    extern "C" void layout(long *out) {{
        *out++ = sizeof(CUstreamBatchMemOpParams);
        *out++ = CU_STREAM_MEM_OP_WAIT_VALUE_32, *out++ = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        *out++ = CU_STREAM_WAIT_VALUE_GEQ;
        {" ".join(f"*out++ = offsetof(CUstreamBatchMemOpParams, waitValue.{name});" for name in names)}
        {" ".join(f"*out++ = offsetof(CUstreamBatchMemOpParams, writeValue.{name});" for name in names)}
    }}
    """
    source, library = tmp_path / "layout.cpp", tmp_path / "layout.so"
    source.write_text(code)
    assert HEADER is not None and signals.OPERATION.fields is not None
    compiler = [build.compiler(), "-shared", "-fPIC", f"-I{HEADER.parent}", "-Wno-invalid-offsetof"]
    subprocess.run([*compiler, str(source), "-o", str(library)], check=True)
    layout = np.zeros(12, np.int64)
    ctypes.CDLL(str(library)).layout(ctypes.c_void_p(layout.ctypes.data))
    offsets = [signals.OPERATION.fields[name][1] for name in names]
    numbers = [signals.OPERATION.itemsize, signals.WAIT_VALUE_32, signals.WRITE_VALUE_32, 0]
    assert layout.tolist() == [*numbers, *offsets, *offsets]
