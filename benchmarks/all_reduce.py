"""All-reduce against its peers, alternating in one process on buffers of the same kind.

    mpirun -n 2 python benchmarks/all_reduce.py [--dtype float32] [--buffers symmetric] [--quick] [--out FILE.json]

This is a fixed selection of the measurements of `commlib bench`, with the same code, in the format of compare.py. The
columns are those of nccl-tests: size, count, type, time, algbw (size / time), busbw (algbw * 2(P-1)/P), wrong elements,
then each peer's time and, in brackets, its ratio to ours. Times are those of the slowest rank: the median over rounds
of the mean of a burst of calls. Peers:

    mpi     MPI_Allreduce in place through mpi4py (for float16 and bfloat16: a user-defined operation in numpy)
    pieces  the same in pieces of 1 MiB
    gloo    torch.distributed on gloo, if torch is installed

`--fresh` rewrites the buffer before every call, as a training step does; without it the data may stay in the cache, for
every contender alike. An MPI library with tuned settings needs another process start: see compare.py.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from mpi4py import MPI

import commlib
from commlib.bench import gloo_peer, record
from commlib.bench.options import BenchOptions, check
from commlib.bench.rows import BenchRow, mistakes
from commlib.bench.session import Session

SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK = [4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
PEERS = ("mpi", "pieces", "gloo")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--buffers", choices=("symmetric", "ordinary"), default="symmetric")
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes")
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--fresh", action="store_true", help="rewrite the buffer before every call")
    parser.add_argument("--out", type=Path, help="write raw results to this JSON file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    comm, world = commlib.init(), MPI.COMM_WORLD
    facts = record.gather_program_facts(world)
    peers = [peer for peer in arguments.peers if peer != "gloo" or gloo_peer.problem() is None]
    options = BenchOptions(
        "all_reduce",
        sizes=tuple(arguments.sizes or (QUICK if arguments.quick else SIZES)),
        dtypes=(arguments.dtype,),
        peers=tuple(peers),
        symmetric=arguments.buffers == "symmetric",
        rounds=3 if arguments.quick else arguments.rounds,
        fresh=arguments.fresh,
    )
    rows = []
    with ExitStack() as stack:
        if "gloo" in peers:
            stack.enter_context(gloo_peer.join_gloo(world, one_node=comm.one_node))
        session = Session(comm, world, check(options, comm.size), bound=False)
        session.probe()
        for row in session.rows():
            rows.append(row)
            if world.rank == 0:
                print_row(row, header=len(rows) == 1)
    if world.rank == 0 and arguments.out:
        columns = ("size", "count", "wrong", "seconds")
        raw = [{name: getattr(row, name) for name in columns} for row in rows]
        record.write(arguments.out, "all_reduce", facts, arguments, ranks=world.size, rows=raw)
    if failed := mistakes(rows):
        raise SystemExit(f"{failed} wrong elements")


def print_row(row: BenchRow, *, header: bool) -> None:
    if header:
        peers = "".join(f"{name + ' us':>22}" for name in PEERS)
        print(f"{'size':>10}{'count':>10}{'type':>10}{'time us':>12}{'algbw':>8}{'busbw GB/s':>12}{'wrong':>7}{peers}")
    cells = "".join(
        f"{row.time(name) * 1e6:>13.2f} ({row.ratio(name):5.1f}x)" if name in row.seconds else " " * 22
        for name in PEERS
    )
    print(
        f"{row.size:>10}{row.count:>10}{row.dtype:>10}{row.time() * 1e6:>12.2f}{row.algbw():>8.2f}"
        f"{row.busbw():>12.2f}{mistakes([row]):>7}{cells}",
        flush=True,
    )


if __name__ == "__main__":
    main()
