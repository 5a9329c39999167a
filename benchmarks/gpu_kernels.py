"""Kernels on the GPU of one process: the memory rate of each, against a copy of as many bytes.

    python benchmarks/gpu_kernels.py [--tiny] [--out FILE.json]

GB/s counts the bytes that must be read and written, "of copy" compares with a copy of those. --tiny runs everything on
an emulated GPU in host memory: its figures mean nothing.

Kernels that return a number are measured twice: by the host, which waits for the number, and "unread", by GPU events.

tests/gpu/test_kernels.py compares their results with the host's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import commlib
from benchmarks.gpu_machine import Call, Machine, copy_rate
from commlib.bench import record
from commlib.devices.cuda.launcher import CupyLauncher
from commlib.dtypes import COMPLEX, DTYPES, NUMPY, kernel_operation
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.protocol import Kernels

NBYTES, TINY_BYTES = 256 << 20, 16 << 10  # of a float32 array
BLOCKS = (256, 1024)  # the codecs' default is one of these
ROUNDS, BURST_SECONDS = 3, 0.03
PIECES = 64  # arrays that are packed into one


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel on fixed arrays. moved: bytes read and written. waits: whether it waits for a number, to return it."""

    name: str
    moved: int
    call: Call
    waits: bool = False


@dataclass(frozen=True, slots=True)
class KernelRow:
    """GB/s of a kernel and of a copy of as many bytes; seconds of each round, by events, or by the host if it waits."""

    name: str
    moved: int
    clock: str
    seconds: list[float]
    copy: float

    @property
    def rate(self) -> float:
        return self.moved / statistics.median(self.seconds) / 1e9


class UnreadLauncher(CupyLauncher):
    """A launcher that never waits: the numbers returned by kernels are all zero."""

    def read(self, memory: Any, dtype: Any) -> Any:
        return np.zeros(memory.nbytes, np.uint8).view(dtype)


def waiting(machine: Machine, name: str, moved: int, call: Callable[[Kernels], Any]) -> Iterator[KernelCase]:
    """Yield a kernel that returns a number, read and unread."""
    unread = CudaKernels(UnreadLauncher(machine.gpu, import_module("cupy")))
    yield KernelCase(name, moved, lambda: call(machine.gpu.kernels), waits=True)
    yield KernelCase(f"{name}, unread", moved, lambda: call(unread))


def cases(machine: Machine, nbytes: int) -> Iterator[KernelCase]:
    """Yield every kernel whose speed matters."""
    yield from _reductions(machine, nbytes)
    kernels, count = machine.gpu.kernels, nbytes // 4
    x, before, out = (_floats(machine, count, seed) for seed in range(3))
    half = _array(machine, count, "bfloat16")
    wide = _array(machine, count // 2, "float64")
    yield KernelCase("cast float32 to bfloat16", 6 * count, lambda: kernels.cast(x, half))
    yield KernelCase("cast bfloat16 to float32", 6 * count, lambda: kernels.cast(half, out))
    yield KernelCase("cast float32 to float64", 6 * count, lambda: kernels.cast(x[: count // 2], wide))
    yield KernelCase("fill float32", 4 * count, lambda: kernels.fill(out, 1))
    yield KernelCase("scale float32", 8 * count, lambda: kernels.scale(out, 0.5))
    yield from waiting(machine, "squares float32", 4 * count, lambda kernels: kernels.squares(x))
    yield from waiting(machine, "is_finite", 4 * count, lambda kernels: kernels.is_finite(x))
    yield KernelCase("add_momentum", 20 * count, lambda: kernels.add_momentum(out, before, before, 1.0, 0.9, False))
    packed = _array(machine, 4 * count, "uint8")
    pieces = [x[start : start + count // PIECES] for start in range(0, count, count // PIECES)]
    yield KernelCase(f"pack {PIECES} arrays", 8 * count, lambda: kernels.pack(pieces, packed))
    yield KernelCase(f"unpack {PIECES} arrays", 8 * count, lambda: kernels.unpack(packed, pieces))
    yield from _codecs(machine, x, before, out, packed)


def _reductions(machine: Machine, nbytes: int) -> Iterator[KernelCase]:
    kernels = machine.gpu.kernels
    for dtype in DTYPES:
        arrays = [_array(machine, nbytes // NUMPY[dtype].itemsize, dtype) for _ in range(5)]
        op = kernel_operation(dtype, "sum")
        for inputs in (2, 4):
            ins, target = arrays[:inputs], arrays[4]
            yield KernelCase(
                f"reduce {inputs} {dtype}", (inputs + 1) * nbytes,
                lambda ins=ins, target=target, dtype=dtype, op=op: kernels.reduce(dtype, op, 1, ins, target),  # type: ignore[misc]
            )  # fmt: skip
        if dtype not in COMPLEX:
            targets = arrays[:2]
            yield KernelCase(
                f"reduce_to 2 {dtype}", 4 * nbytes,
                lambda targets=targets, dtype=dtype, op=op: kernels.reduce_to(dtype, op, 1, targets, targets),  # type: ignore[misc]
            )  # fmt: skip


def _codecs(machine: Machine, x: Any, before: Any, out: Any, payload: Any) -> Iterator[KernelCase]:
    kernels, count = machine.gpu.kernels, len(x)
    yield KernelCase("narrow to bfloat16", 6 * count, lambda: kernels.narrow(x, None, None, payload, True))
    yield KernelCase("widen from bfloat16", 6 * count, lambda: kernels.widen(payload[: 2 * count], out, True, False))
    for block in BLOCKS:
        yield from _blocks(machine, x, before, out, payload, block)
    k = max(1, count // 1000)
    # The chosen elements and their number are not counted: they are few.

    def largest(kernels: Kernels) -> int:
        return kernels.largest(x, None, None, k, "float32", payload)

    yield from waiting(machine, "largest 0.1 %", 4 * count, largest)
    chosen = payload[: largest(kernels)]
    yield from waiting(
        machine, "read_sparse 0.1 %", 4 * count, lambda kernels: kernels.read_sparse(chosen, "float32", out, False)
    )


def _blocks(machine: Machine, x: Any, before: Any, out: Any, payload: Any, block: int) -> Iterator[KernelCase]:
    """Yield the codecs whose payloads consist of blocks."""
    kernels, count = machine.gpu.kernels, len(x)
    scales = 4 * count // block
    for code, top, size in (("int8", 127.0, count), ("int4", 7.0, count // 2), ("e4m3", 448.0, count)):
        written, name = payload[: size + scales], f"{code} {block}"
        how: tuple[Any, ...] = (block, code, top, False, False, 0)
        yield KernelCase(f"quantise {name}", 4 * count + size + scales,
                   lambda written=written, how=how: kernels.quantise(x, None, None, written, *how))  # type: ignore[misc]  # fmt: skip
        yield KernelCase(f"quantise {name} with feedback", 12 * count + size + scales,
                   lambda written=written, how=how: kernels.quantise(x, before, before, written, *how))  # type: ignore[misc]  # fmt: skip
        yield KernelCase(f"restore {name}", 4 * count + size + scales,
                   lambda written=written, code=code: kernels.restore(written, out, block, code, False))  # type: ignore[misc]  # fmt: skip
        yield KernelCase(f"restore {name}, added", 8 * count + size + scales,
                   lambda written=written, code=code: kernels.restore(written, out, block, code, True))  # type: ignore[misc]  # fmt: skip
    bits = payload[: count // 8 + scales]
    yield KernelCase(f"signs {block}", 4 * count + len(bits), lambda: kernels.signs(x, None, None, bits, block))
    yield KernelCase(f"signs {block} with feedback", 12 * count + len(bits),
               lambda: kernels.signs(x, before, before, bits, block))  # fmt: skip
    yield KernelCase(f"unsign {block}", 4 * count + len(bits), lambda: kernels.unsign(bits, out, block, False))


def _array(machine: Machine, count: int, dtype: str) -> Any:
    array = machine.gpu.wrap(machine.empty(count, dtype), "benchmark")
    machine.gpu.kernels.fill(array, 0)
    return array


def _floats(machine: Machine, count: int, seed: int) -> Any:
    result = machine.empty(count, "float32")
    period = np.random.default_rng(seed).standard_normal(min(count, 1_000_003), np.float32)
    machine.put(result, np.resize(period, count))
    return machine.gpu.wrap(result, "benchmark")


def measure(machine: Machine, *, tiny: bool) -> dict[str, Any]:
    """Measure and print all kernels; return the figures."""
    nbytes = TINY_BYTES if tiny else NBYTES
    copies: dict[int, float] = {}
    rows = []
    print(f"{'kernel':<32}{'MiB moved':>11}{'us':>10}{'GB/s':>9}{'copy GB/s':>11}{'of copy':>9}  clock")
    for case in cases(machine, nbytes):
        case.call()
        machine.finish()
        host, _ = machine.seconds(case.call, 1)
        calls = 1 if tiny else max(2, min(500, int(BURST_SECONDS / host)))
        times = [machine.seconds(case.call, calls)[0 if case.waits else 1] for _ in range(1 if tiny else ROUNDS)]
        if case.moved not in copies:
            copies[case.moved] = copy_rate(machine, case.moved // 2, 2 if tiny else 10)
        row = KernelRow(case.name, case.moved, "host" if case.waits else "events", times, copies[case.moved])
        rows.append({**asdict(row), "rate": row.rate})
        print(
            f"{row.name:<32}{row.moved / 2**20:>11.1f}{statistics.median(times) * 1e6:>10.1f}{row.rate:>9.1f}"
            f"{row.copy:>11.1f}{100 * row.rate / row.copy:>7.0f} %  {row.clock}",
            flush=True,
        )
    return {"kernels": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on an emulated GPU")
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    arguments = parser.parse_args()
    comm = commlib.init()
    machine = Machine(comm, tiny=arguments.tiny)
    facts = {**record.gather_program_facts(MPI.COMM_WORLD), **machine.facts()}
    with machine.gpu.using(machine.gpu.stream()):
        measured = measure(machine, tiny=arguments.tiny)
    if arguments.out:
        record.write(arguments.out, "gpu kernels", facts, arguments, **measured)


if __name__ == "__main__":
    main()
