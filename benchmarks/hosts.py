"""Compare all-reduce between hosts with its peers and with the bound of the links, whose rate is known.

    source ci/env.sh
    python benchmarks/hosts.py [--hosts 2] [--ranks-per-host 1] [--rate 1gbit] [--sizes BYTES ...] [--out FILE.json]

Starts one job on emulated hosts (ci/hosts.py: root only) with the mpiexec of this environment. The contenders reduce
the same float32 array in place, in turn, in rounds whose order rotates: commlib, MPI_Allreduce of the MPI library in
use, and gloo by torch.distributed if torch is installed. Times are those of the slowest rank: the median over rounds of
the mean of a burst of calls.

The bound: with H hosts, a host must send and receive at least 2(H-1)/H times the array, for any number of ranks. The
next columns show the share of the bound that each time reaches, and the bytes really sent by the busiest host as a
multiple of the bound. TCP's headers take 4.4 % of a link with packets of 1500 bytes, so no share can stay above 96 %.
But a link passes a burst of 1 ms at once, so arrays of few milliseconds look better than they are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launching import run
from ci.hosts import bits_per_second
from commlib.bench import record

Call = Callable[[], Any]
SIZES = [4, 1 << 10, 64 << 10, 4 << 20, 16 << 20, 64 << 20]
BURST_SECONDS, MOST = 0.1, 500
LARGE = 4 << 20  # bytes; from here on a third of the rounds
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass
class Figures:
    """Figures of one contender at one size."""

    wrong: int
    calls: int
    seconds: list[float] = field(default_factory=list)  # per call, of the slowest rank, of each round
    sent: list[float] = field(default_factory=list)  # bytes per call, of the host that sent most, of each round


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=9, help="a third of them from 4 MiB up (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", default=["mpi", "gloo"], choices=["mpi", "gloo"])
    parser.add_argument("--buffers", choices=["symmetric", "ordinary"], default="symmetric")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the job (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a rank of the job
    options = parser.parse_args()
    if options.hosts < 2 or options.ranks_per_host < 1 or options.rounds < 1 or min(options.sizes) < 4:
        parser.error("expected at least 2 hosts, 1 rank on each, 1 round, and sizes of at least 4 bytes")
    try:
        bits_per_second(options.rate)
    except ValueError as error:
        parser.error(str(error))
    return options


def contenders(comm: Any, x: Any, peers: list[str]) -> dict[str, Call]:
    from mpi4py import MPI

    calls: dict[str, Call] = {"commlib": lambda: comm.all_reduce(x, out=x)}
    if "mpi" in peers:
        calls["mpi"] = partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, x, MPI.SUM)
    if "gloo" in peers:
        import torch
        import torch.distributed as dist

        calls["gloo"] = partial(dist.all_reduce, torch.from_numpy(x))
    return calls


def wrong(call: Call, x: Any) -> int:
    """Return the number of elements that differ from the sum, over all ranks."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    pattern = np.arange(len(x), dtype=np.float32) % 17
    x[:] = pattern + world.rank
    world.Barrier()  # peers that still fill their arrays must not overwrite data written by a contender
    call()
    return int(world.allreduce(int((x != pattern * world.size + sum(range(world.size))).sum())))


def burst(call: Call, calls: int) -> tuple[float, float]:
    """Return seconds per call of the slowest rank, and bytes per call that the busiest host sent."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    call()  # settles: a contender that sleeps in its waits may leave several ranks on one core for the next one
    world.Barrier()
    before = int(SENT.read_text())
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start
    world.Barrier()
    nbytes = int(SENT.read_text()) - before
    return world.allreduce(spent / calls, MPI.MAX), world.allreduce(nbytes / calls, MPI.MAX)


def measure(calls: dict[str, Call], x: Any, rounds: int) -> dict[str, Figures]:
    """Measure all contenders in turn."""
    names = list(calls)
    mistakes = {name: wrong(call, x) for name, call in calls.items()}
    x[:] = 0
    figures = {}
    for name, call in calls.items():
        seconds, _ = burst(call, 1)
        figures[name] = Figures(mistakes[name], max(1, min(MOST, int(BURST_SECONDS / seconds))))
    for turn in range(rounds):
        for position in range(len(names)):
            name = names[(position + turn) % len(names)]
            seconds, nbytes_sent = burst(calls[name], figures[name].calls)
            figures[name].seconds.append(seconds)
            figures[name].sent.append(nbytes_sent)
    return figures


def work(options: argparse.Namespace) -> int:
    """Run one rank of the job; return 1 if any contender's result was wrong."""
    import numpy as np
    from mpi4py import MPI

    import commlib
    from commlib.bench import gloo_peer

    comm, world = commlib.init(), MPI.COMM_WORLD
    facts = record.gather_program_facts(world, starts_itself=True)
    if gloo_peer.problem() is not None:
        options.peers = [peer for peer in options.peers if peer != "gloo"]
    library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
    if world.rank == 0:
        print(
            f"{options.hosts} hosts x {options.ranks_per_host}, {options.rate}, float32, {options.buffers}, {library}"
        )
    rows = []
    with gloo_peer.join_gloo(world, one_node=False) if "gloo" in options.peers else nullcontext():
        for size in options.sizes:
            count = size // 4
            x = comm.empty(count) if options.buffers == "symmetric" else np.zeros(count, np.float32)
            rounds = options.rounds if size < LARGE else max(1, options.rounds // 3)
            figures = measure(contenders(comm, x, options.peers), x, rounds)
            rows.append((4 * count, figures))
            if world.rank == 0:
                print_row(*rows[-1], options, header=len(rows) == 1)
    if world.rank == 0 and options.out:
        raw = [{"size": size, **{name: vars(of) for name, of in figures.items()}} for size, figures in rows]
        record.write(options.out, "hosts", facts, options, rows=raw)
    return int(any(of.wrong for _, figures in rows for of in figures.values()))


def print_row(size: int, figures: dict[str, Figures], options: argparse.Namespace, *, header: bool) -> None:
    """Print the bound, then each contender's time, share of the link, traffic, and ratio to our time."""
    need = 2 * (options.hosts - 1) / options.hosts * size
    bound = need / (bits_per_second(options.rate) / 8)
    if header:
        titles = "".join(f"{name + ' ms':>13}{'link':>6}{'sent':>7}{'ratio':>7}" for name in figures)
        print(f"{'size':>10}{'bound ms':>10}{titles}{'wrong':>7}")
    ours = statistics.median(figures["commlib"].seconds)
    cells = ""
    for of in figures.values():
        seconds, nbytes = statistics.median(of.seconds), statistics.median(of.sent)
        cells += f"{seconds * 1e3:>13.3f}{bound / seconds:>6.0%}{nbytes / need:>7.2f}{seconds / ours:>7.2f}"
    print(f"{size:>10}{bound * 1e3:>10.3f}{cells}{sum(of.wrong for of in figures.values()):>7}", flush=True)


if __name__ == "__main__":
    sys.exit(run(__file__, parse(), work))
