"""NVRTC compiles all kernels, for GPUs from Volta to Blackwell. Nothing runs: this needs its wheels, but no driver."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib.dtypes import BITWISE, DTYPES, FLOATS, INTEGERS, kernel_operation, numpy_dtype
from commlib.kernels.cuda.launcher import Defines
from commlib.kernels.cuda.sources import FOLDER
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.protocol import BlockLayout
from tests.cuda.nvrtc import compiled
from tests.oracles.oracle import REDUCIBLE

# For the first, all kernels of CudaKernels are compiled; for the others every sixteenth combination of defines of a
# source, at least one.
FIRST, OTHERS = "sm_90", ("sm_70", "sm_80", "sm_100", "sm_120")
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
COUNT = 5000  # elements, more than fit a worker's lanes

Told = tuple[str, ...]
"""Defines as passed to a compiler."""


class Recorder:
    """A Launcher that records compilations. All memory it reads is zero."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[Told, set[str]]] = {}  # of each source: the kernels that are launched

    def launch(self, source: str, kernel: str, defines: Defines, workers: int, *args: Any) -> None:
        defined = tuple(f"{name}={value}" for name, value in sorted(defines.items()))
        self.modules.setdefault(source, {}).setdefault(defined, set()).add(kernel)

    def scratch(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)

    def read(self, memory: Any, dtype: Any) -> Any:
        return memory.view(dtype)


def call_all(kernels: CudaKernels) -> None:
    """Call every kernel on every dtype and in every way that has a module of its own."""
    x, payload, places = np.ones(COUNT, np.float32), np.zeros(16 * COUNT, np.uint8), np.arange(40, dtype=np.uint32)
    arrays = {name: np.zeros(COUNT, numpy_dtype(name)) for name in DTYPES}
    for dtype, op in [*REDUCIBLE, *itertools.product(INTEGERS, BITWISE)]:
        kernels.reduce(dtype, kernel_operation(dtype, op), 2, [arrays[dtype]] * 40, arrays[dtype])
    for dtype in DTYPES:
        kernels.fill(arrays[dtype], 1)
        kernels.scale(arrays[dtype], 1)
    for source, target in itertools.product((*FLOATS, "int64", "uint64", "int8", "uint32", "bool"), repeat=2):
        kernels.cast(arrays[source], arrays[target])
    for dtype in FLOATS:
        kernels.squares(arrays[dtype])
    kernels.pack([x, x], payload)
    kernels.unpack(payload, [x, x])
    kernels.is_finite(x)
    for bfloat in (False, True):
        kernels.narrow(x, None, None, payload, bfloat)
        kernels.widen(payload, x, bfloat, False)
    for code, top in (("int8", 127.0), ("int4", 7.0), ("e4m3", 448.0), ("e5m2", 57344.0)):
        for block, by_norm, at_random in itertools.product((256, 2048, 300, COUNT), (False, True), (False, True)):
            for before in (None, x):
                how: tuple[Any, ...] = (block, code, top, by_norm, at_random, 1)
                kernels.quantise(x, before, before, payload, *how)
            kernels.restore(payload, x, block, code, False)  # type: ignore[arg-type]
    for block in (256, 512, 1024, 2048, 300, COUNT):
        for before in (None, x):
            kernels.signs(x, before, before, payload, block)
        kernels.unsign(payload, x, block, False)
    kernels.draw(COUNT, 1, places)
    kernels.place(x[:40], places, x)
    kernels.take(x, x, x, places, 1.0, x[:40].copy())
    kernels.random(x, x, x, 40, 1, 1.0, payload)
    kernels.add_momentum(x, x, x, 1.0, 0.9, False)
    for array in arrays.values():
        for run in (1, 40):
            kernels.copy_blocks(array, array, BlockLayout(2, 3, run, run, 2 * run, 3 * run, run))
    for dtype in FLOATS:
        rows = arrays[dtype]
        for factors in (None, x):
            kernels.take_rows(rows, rows, factors, places, 8, rows)
        kernels.sum_rows(rows, rows, x, places, places, 8, rows)
        kernels.multiply_rows(rows, rows, x, 8, rows, x)
    for value in ("float32", "float16", "bfloat16"):
        for before in (None, x):
            kernels.largest(x, before, before, 40, value, payload)
        kernels.accumulate(x, x, x, x, x, 1.0, 0.9, False, 40, value, payload)
        kernels.read_sparse(payload, value, x, False)
    for rank in (1, 4):
        matrix, left, right = x[:4900], x[: 70 * rank].copy(), x[: 70 * rank].copy()
        kernels.orthonormalise(left, rank, 1e-8)
        kernels.project(matrix, matrix, 70, 70, right, left, rank)
        kernels.project_back(matrix, 70, 70, left, right, rank)
        kernels.expand(matrix, matrix, 70, 70, left, right, right, rank)


@cache
def modules() -> dict[str, dict[Told, set[str]]]:
    recorder = Recorder()
    call_all(CudaKernels(recorder))
    return recorder.modules


def check(source: str, defines: Told, arch: str) -> None:
    code, log = compiled(source, defines, arch)
    for kernel in modules()[source][defines]:
        assert b"\0.text." + kernel.encode() + b"\0" in code, f"{source} has no kernel {kernel}"
    assert not re.search(r"warning #", log), f"{source} {defines}:\n{log}"


@pytest.fixture(scope="module", autouse=True)
def lanes() -> None:
    """No kernel runs here."""


@pytest.mark.parametrize("step", [25, 1], ids=["some", "all"])
@pytest.mark.parametrize("source", SOURCES)
def test_launched_kernels_compile(source: str, step: int) -> None:
    for defines in list(modules()[source])[::step]:
        check(source, defines, FIRST)


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_compile_for_other_architectures(source: str, arch: str) -> None:
    for defines in list(modules()[source])[::40]:
        check(source, defines, arch)


@pytest.mark.parametrize(
    "source", ["cast.cu", "finite.cu", "momentum.cu", "pack.cu", "reduce.cu", "rows.cu", "scale.cu"]
)
def test_runs_are_loaded_and_stored_as_vectors(source: str) -> None:
    """The compiler once merged the branches for aligned and other addresses, and stored words one by one."""
    for defines in list(modules()[source])[::40]:
        ptx, _ = compiled(source, defines, "compute_90")
        words = {kind: set(re.findall(rf"\b{kind}[.\w]*\.v[24]\.\w+", ptx.decode())) for kind in ("ld", "st")}
        assert words["ld"] and (words["st"] or source == "finite.cu"), (defines, words)
        assert ".local" not in ptx.decode(), f"{source} {defines} keeps something in memory of its own"


def test_errors_and_warnings_of_nvrtc_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this file could never fail."""
    monkeypatch.setattr("commlib.kernels.cuda.sources.FOLDER", tmp_path)
    tmp_path.joinpath("wrong.cu").write_text('extern "C" __global__ void wrong() { int x = y; }')
    with pytest.raises(AssertionError, match='identifier "y" is undefined'):
        compiled("wrong.cu", (), FIRST)
    tmp_path.joinpath("odd.cu").write_text('extern "C" __global__ void odd() { int x = 1; }')
    assert "warning #" in compiled("odd.cu", (), FIRST)[1]
