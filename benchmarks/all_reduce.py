"""All-reduce against its peers, in turn inside one process on buffers of the same kind.

    mpirun -n 2 python benchmarks/all_reduce.py [--dtype float32] [--buffers symmetric] [--quick] [--out FILE.json]

Columns as in nccl-tests: size, count, type, time, algbw (size / time), busbw (algbw * 2(P-1)/P), wrong elements, then
each peer's time and, in brackets, how many times as long as ours it takes. Times are those of the slowest rank: the
median over rounds of the mean of a burst of calls. Peers:

    mpi     MPI_Allreduce in place through mpi4py (for float16 and bfloat16: a user-defined operation in numpy)
    pieces  the same in pieces of 1 MiB
    gloo    torch.distributed on gloo, if torch is installed

`--fresh` rewrites the buffer before every call, as a training step does; without it the data may stay in the cache
where it was reduced, for every contender alike. An MPI library tuned by its own settings is another process start:
see compare.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

import commlib
from commlib.dtypes import numpy_dtype

Call = Callable[[], Any]
PIECE_BYTES = 1 << 20
SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK = [4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
BURST_SECONDS, FEWEST, MOST = 0.03, 2, 2000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--buffers", choices=("symmetric", "ordinary"), default="symmetric")
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes")
    parser.add_argument("--peers", nargs="*", default=["mpi", "pieces", "gloo"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--fresh", action="store_true", help="rewrite the buffer before every call")
    parser.add_argument("--out", help="write raw results to this JSON file")
    return parser.parse_args()


def mpi_contenders(x: Any) -> dict[str, Call]:
    """MPI_Allreduce of the whole array, and in pieces."""
    world, operation, view = MPI.COMM_WORLD, MPI.SUM, x
    if x.dtype.itemsize == 2:  # MPI has no sum for these that is fast, or none at all

        def add(a: Any, b: Any, _: Any) -> None:
            np.add(np.frombuffer(a, x.dtype), np.frombuffer(b, x.dtype), np.frombuffer(b, x.dtype))

        operation, view = MPI.Op.Create(add, commute=True), x.view(np.uint16)
    step = PIECE_BYTES // x.itemsize
    slices = [view[i : i + step] for i in range(0, len(x), step)]

    def pieces() -> None:
        for piece in slices:
            world.Allreduce(MPI.IN_PLACE, piece, operation)

    return {"mpi": lambda: world.Allreduce(MPI.IN_PLACE, view, operation), "pieces": pieces}


def gloo_contender(x: Any) -> dict[str, Call]:
    """torch.distributed on gloo; nothing where torch is not installed."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return {}
    if not dist.is_initialized():
        world = MPI.COMM_WORLD
        folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
        store = dist.FileStore(  # type: ignore[attr-defined]
            f"{folder}/store", world.size
        )
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    half = x.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(x)
    return {"gloo": lambda: dist.all_reduce(tensor)}


def leave_gloo() -> None:
    """Stop gloo's threads, which otherwise crash when the interpreter ends under them."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def settle(call: Call, calls: int) -> None:
    """Run half a burst that does not count.

    A contender that sleeps in its waits, as gloo does, may leave both ranks on one core; the kernel takes milliseconds
    to part them, which would be charged to whoever comes next.
    """
    for _ in range(calls // 2):
        call()


def burst(call: Call, calls: int) -> Any:
    """Seconds per call of the slowest rank."""
    settle(call, calls)
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return MPI.COMM_WORLD.allreduce((time.perf_counter() - start) / calls, MPI.MAX)


def fresh_burst(call: Call, calls: int, x: Any) -> Any:
    """The same, of calls on data that this rank has just written."""
    spent = 0.0
    settle(call, calls)
    for _ in range(calls):
        x[:] = 0
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        call()
        spent += time.perf_counter() - start
    return MPI.COMM_WORLD.allreduce(spent / calls, MPI.MAX)


def wrong(call: Call, x: Any) -> Any:
    """How many elements are not the sum, over all ranks."""
    world = MPI.COMM_WORLD
    x[:] = (np.arange(len(x)) % 17 + world.rank).astype(x.dtype)
    call()
    expected = (np.arange(len(x)) % 17) * world.size + world.size * (world.size - 1) // 2
    return world.allreduce(int((x != expected.astype(x.dtype)).sum()))


def main() -> None:
    options = parse()
    comm, world = commlib.init(), MPI.COMM_WORLD
    dtype = numpy_dtype(options.dtype)
    sizes = options.sizes or (QUICK if options.quick else SIZES)
    rounds = 3 if options.quick else options.rounds
    rows = []
    for size in sizes:
        count = max(1, size // dtype.itemsize)
        x = comm.empty(count, dtype) if options.buffers == "symmetric" else np.zeros(count, dtype)
        calls: dict[str, Call] = {"commlib": lambda x=x: comm.all_reduce(x, out=x)}  # type: ignore[misc]
        calls |= mpi_contenders(x) | (gloo_contender(x) if "gloo" in options.peers else {})
        calls = {name: call for name, call in calls.items() if name == "commlib" or name in options.peers}
        if size <= PIECE_BYTES:
            calls.pop("pieces", None)
        mistakes = {name: wrong(call, x) for name, call in calls.items()}
        x[:] = 0
        times: dict[str, list[float]] = {name: [] for name in calls}
        number = {
            name: max(FEWEST, min(MOST, int(BURST_SECONDS / max(burst(call, FEWEST), 1e-7))))
            for name, call in calls.items()
        }
        for _ in range(rounds):
            for name, call in calls.items():  # in turn, so that a slow spell hits all of them
                measured = fresh_burst(call, number[name], x) if options.fresh else burst(call, number[name])
                times[name].append(measured)
        rows.append({"size": size, "count": count, "wrong": mistakes, "seconds": times})
        if world.rank == 0:
            print_row(rows[-1], options.dtype, world.size, header=len(rows) == 1)
    leave_gloo()
    failed = sum(row["wrong"]["commlib"] for row in rows)  # type: ignore[index,misc]
    if world.rank == 0 and options.out:
        library = MPI.Get_library_version().splitlines()[0]
        facts = {"ranks": world.size, "library": library, **vars(options), "rows": rows}
        with open(options.out, "w") as file:
            json.dump(facts, file)
    if failed:
        raise SystemExit(f"{failed} wrong elements")


def print_row(row: dict[str, Any], dtype: str, ranks: int, *, header: bool) -> None:
    medians = {name: statistics.median(values) for name, values in row["seconds"].items()}
    ours = medians.pop("commlib")
    if header:
        peers = "".join(f"{name + ' us':>22}" for name in ("mpi", "pieces", "gloo"))
        print(f"{'size':>10}{'count':>10}{'type':>10}{'time us':>12}{'algbw':>8}{'busbw GB/s':>12}{'wrong':>7}{peers}")
    algbw = row["size"] / ours / 1e9
    cells = "".join(
        f"{medians[name] * 1e6:>13.2f} ({medians[name] / ours:5.1f}x)" if name in medians else " " * 22
        for name in ("mpi", "pieces", "gloo")
    )
    print(
        f"{row['size']:>10}{row['count']:>10}{dtype:>10}{ours * 1e6:>12.2f}{algbw:>8.2f}"
        f"{algbw * 2 * (ranks - 1) / ranks:>12.2f}{row['wrong']['commlib']:>7}{cells}",
        flush=True,
    )


if __name__ == "__main__":
    main()
