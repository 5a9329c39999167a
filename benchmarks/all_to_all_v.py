"""all_to_all_v on a node against MPI_Alltoallv, on ordinary arrays and on symmetric memory.

    mpirun --bind-to none -n 2 python benchmarks/all_to_all_v.py [--sizes BYTES ...] [--rounds 15] [--out FILE.json]

A size is the bytes from each rank to each on average. Patterns:

balanced    the same amount to every rank
skewed      seven eighths to the last rank, as to a popular expert
shifted     everything to the next rank, nothing to all others including this rank

Contenders alternate on the same bytes, in rounds whose order rotates, in one process on each rank. All get the counts
(`takes=`) and a result array (`out=`), as MPI does. "told" is the verb without them: ranks exchange counts, and the
result is a new array. "plan" and "verb" are called on ordinary arrays, and on an `x`, an `out` or both in symmetric
memory. Times are those of the slowest rank, per call: the median over rounds of the mean of a burst. After each round
every result is compared with the sent data.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import commlib
from commlib.bench import record

SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
PATTERNS = ("balanced", "skewed", "shifted")
CONTENDERS = (
    "MPI",
    "plan",
    "verb",
    "told",
    "plan, symmetric",
    "verb, symmetric",
    "plan, symmetric x",
    "plan, symmetric out",
)
BURST_SECONDS, LEAST, MOST = 0.02, 3, 5000

Call = Callable[[], Any]


def matrix(pattern: str, size: int, count: int) -> Any:
    """Return the number of elements from each rank to each rank, `count` on average."""
    counts = np.zeros((size, size), np.int64)
    if pattern == "balanced":
        counts[:] = count
    elif pattern == "shifted":
        for rank in range(size):
            counts[rank, (rank + 1) % size] = size * count
    else:
        counts[:] = size * count // 8 // max(1, size - 1)
        counts[:, -1] = size * count - counts[:, :-1].sum(1)
    return counts


def contenders(comm: Any, counts: Any, names: list[str], memory: Any) -> dict[str, tuple[Call, Any, Any]]:
    """Return each contender's call, its array and its result array, if any."""
    splits, takes = counts[comm.rank].tolist(), counts[:, comm.rank].tolist()
    inputs, received = sum(splits), sum(takes)
    plain_x, plain_out = np.zeros(inputs, np.float32), np.zeros(received, np.float32)
    x, out = memory[0][:inputs], memory[1][:received]
    sending = [plain_x, (splits, [0, *np.cumsum(splits)[:-1].tolist()]), MPI.FLOAT]
    taking = [plain_out, (takes, [0, *np.cumsum(takes)[:-1].tolist()]), MPI.FLOAT]
    verb, world = comm.all_to_all_v, MPI.COMM_WORLD

    def plan(x: Any, out: Any) -> Call:
        return comm.plan_all_to_all_v(x, splits, takes=takes, out=out)  # type: ignore[no-any-return]

    makers: dict[str, Callable[[], tuple[Call, Any, Any]]] = {
        "MPI": lambda: (lambda: world.Alltoallv(sending, taking), plain_x, plain_out),
        "plan": lambda: (plan(plain_x, plain_out), plain_x, plain_out),
        "verb": lambda: (lambda: verb(plain_x, splits, takes=takes, out=plain_out), plain_x, plain_out),
        "told": lambda: (lambda: verb(plain_x, splits), plain_x, None),
        "plan, symmetric": lambda: (plan(x, out), x, out),
        "verb, symmetric": lambda: (lambda: verb(x, splits, takes=takes, out=out), x, out),
        "plan, symmetric x": lambda: (plan(x, plain_out), x, plain_out),
        "plan, symmetric out": lambda: (plan(plain_x, out), plain_x, out),
    }
    return {name: makers[name]() for name in names}


def seconds(call: Call, count: int) -> float:
    world = MPI.COMM_WORLD
    world.Barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return float(world.allreduce(time.perf_counter() - begin, MPI.MAX)) / count


def is_right(contender: tuple[Call, Any, Any], counts: Any, rank: int) -> bool:
    call, x, out = contender
    x[:] = np.arange(len(x)) % 1009 + rank
    if out is not None:
        out[:] = -1
    MPI.COMM_WORLD.Barrier()  # else a fast rank writes into an array that a slow one clears
    answer = call()
    received = answer[0] if out is None else out
    starts = np.cumsum(counts, axis=1) - counts
    ranges = ((sender, starts[sender, rank], counts[sender, rank]) for sender in range(len(counts)))
    expected = [np.arange(start, start + count) % 1009 + sender for sender, start, count in ranges]
    return bool(np.array_equal(received, np.concatenate(expected).astype(np.float32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    world, wrong, rows = MPI.COMM_WORLD, 0, []
    memory = [comm.empty(comm.size * comm.size * max(arguments.sizes) // 4) for _ in range(2)]
    for nbytes in arguments.sizes:
        for pattern in arguments.patterns:
            counts = matrix(pattern, comm.size, nbytes // 4)
            players = contenders(comm, counts, arguments.contenders, memory)
            bursts = {}
            for name, (call, _, _) in players.items():
                seconds(call, LEAST)
                bursts[name] = int(max(LEAST, min(MOST, BURST_SECONDS / seconds(call, LEAST))))
            times: dict[str, list[float]] = {name: [] for name in players}
            order = list(players)
            for _ in range(arguments.rounds):
                order = order[1:] + order[:1]
                for name in order:
                    seconds(players[name][0], max(1, bursts[name] // 4))
                    times[name].append(seconds(players[name][0], bursts[name]))
                    wrong += not is_right(players[name], counts, comm.rank)
            for name, samples in times.items():
                row = {"bytes": nbytes, "pattern": pattern, "contender": name, "us": 1e6 * statistics.median(samples)}
                row |= {"least": 1e6 * min(samples), "greatest": 1e6 * max(samples)}
                rows.append(row)
            if comm.rank == 0:
                show(rows[-len(times) :])
    wrong = world.allreduce(wrong)
    if comm.rank == 0 and arguments.out:
        record.write(arguments.out, "all_to_all_v", facts, arguments, wrong=wrong, rows=rows)
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


def show(rows: list[dict[str, Any]]) -> None:
    """Print the times of one size and pattern, and the ratio of MPI's time to each."""
    peer = next((row["us"] for row in rows if row["contender"] == "MPI"), None)
    text = ", ".join(
        f"{row['contender']} {row['us']:.1f}" + (f" ({peer / row['us']:.2f} x)" if peer and row["us"] != peer else "")
        for row in rows
    )
    print(f"{rows[0]['bytes']:>8} B {rows[0]['pattern']:<8} us: {text}".replace(", symmetric", " sym"), flush=True)


if __name__ == "__main__":
    main()
