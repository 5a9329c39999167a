"""Messages between two ranks: a channel against MPI's persistent requests and MPI's Send and Recv.

    mpirun --bind-to none -n 2 python benchmarks/channel.py [--sizes BYTES ...] [--rounds 15] [--out FILE.json]
    python ci/hosts.py 2 --rate 1gbit --ranks-per-host 1 -- python benchmarks/channel.py   # two hosts

Contenders alternate on the same bytes, in rounds whose order rotates, in one process on each rank. Times are those of
the slower rank, per message: the median over rounds of the mean of a burst. Patterns:

exchange    both ranks send one message, then receive one
there       half of a round trip: one message to the other rank and one back
stream      rank 0 sends messages one after the other, rank 1 receives them

"channel" is send, recv and release of an ordinary array; the receiver has the data when recv returns. In "in place" the
message is already in the memory returned by `buffer`: only its transfer is timed. "send/recv" are commlib's verbs. Each
contender's last message of every round is compared with the sent data.
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

SIZES = [8, 256, 4096, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
PATTERNS = ("exchange", "there", "stream")
BURST_SECONDS, LEAST, MOST = 0.02, 3, 5000

Move = Callable[[], Any]


class Contender:
    """A contender: sends one message and receives one. `recv` returns the received array; `done` ends its use."""

    def __init__(self, send: Move, recv: Callable[[], Any], done: Move, exchange: Move | None = None) -> None:
        self.send, self.recv, self.done = send, recv, done
        self._exchange = exchange

    def exchange(self) -> None:
        if self._exchange is not None:
            self._exchange()
        else:
            self.send()
            self.recv()
            self.done()


def contenders(comm: Any, x: Any, names: list[str]) -> dict[str, Contender]:
    world, peer = MPI.COMM_WORLD, 1 - comm.rank
    received = np.zeros_like(x)
    nothing = lambda: None  # noqa: E731
    result = {}
    if "channel" in names:
        channel = comm.channel(peer, f"ordinary {x.nbytes}", x.shape, x.dtype)
        result["channel"] = Contender(lambda: channel.send(x), channel.recv, channel.release)
    if "in place" in names:
        direct = comm.channel(peer, f"in place {x.nbytes}", x.shape, x.dtype)
        for _ in range(2 * direct.depth):  # the data is in place, as after a computation in this memory
            direct.buffer()[...] = x
            direct.send(direct.buffer())
            direct.recv()
            direct.release()
        result["in place"] = Contender(lambda: direct.send(direct.buffer()), direct.recv, direct.release)
    if "MPI persistent" in names:
        start, test = MPI.Prequest.Startall, MPI.Request.Testall
        receive, send = world.Recv_init([received, MPI.BYTE], peer, 7), world.Send_init([x, MPI.BYTE], peer, 7)
        both = [receive, send]

        def persistent() -> None:
            start(both)
            while not test(both):
                pass

        def one(request: Any) -> Any:
            request.Start()
            while not request.Test():
                pass
            return received

        result["MPI persistent"] = Contender(lambda: one(send), lambda: one(receive), nothing, persistent)
    if "MPI Send/Recv" in names:

        def recv() -> Any:
            world.Recv([received, MPI.BYTE], peer)
            return received

        result["MPI Send/Recv"] = Contender(
            lambda: world.Send([x, MPI.BYTE], peer),
            recv,
            nothing,
            lambda: world.Sendrecv([x, MPI.BYTE], peer, 0, [received, MPI.BYTE], peer, 0),
        )
    if "send/recv" in names:
        result["send/recv"] = Contender(
            lambda: comm.send(x, peer),
            lambda: comm.recv(received, peer),
            nothing,
            lambda: comm.send_recv(x, peer, received, peer),
        )
    return result


def burst(pattern: str, contender: Contender, count: int, rank: int) -> None:
    send, recv, done = contender.send, contender.recv, contender.done
    if pattern == "exchange":
        for _ in range(count):
            contender.exchange()
    elif pattern == "there":
        for _ in range(count):
            if rank == 0:
                send()
                recv()
                done()
            else:
                recv()
                done()
                send()
    elif rank == 0:
        for _ in range(count):
            send()
        recv()  # one message back: all have arrived
        done()
    else:
        for _ in range(count):
            recv()
            done()
        send()


def seconds(pattern: str, contender: Contender, count: int, rank: int) -> float:
    world = MPI.COMM_WORLD
    world.Barrier()
    begin = time.perf_counter()
    burst(pattern, contender, count, rank)
    took = world.allreduce(time.perf_counter() - begin, MPI.MAX)
    return float(took) / count / (2 if pattern == "there" else 1)


def is_right(contender: Contender, x: Any, rank: int) -> bool:
    if rank == 0:
        contender.send()
        right = bool((contender.recv() == x).all())
        contender.done()
    else:
        right = bool((contender.recv() == x).all())
        contender.done()
        contender.send()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["channel", "in place", "MPI persistent", "MPI Send/Recv", "send/recv"]
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--contenders", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    comm = commlib.init()
    if comm.size != 2:
        raise SystemExit("start two ranks")
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    rank, world, wrong, rows = comm.rank, MPI.COMM_WORLD, 0, []
    for nbytes in arguments.sizes:
        x = (np.arange(nbytes) % 251).astype(np.uint8)
        players = contenders(comm, x, arguments.contenders)
        for pattern in arguments.patterns:
            for player in players.values():
                burst(pattern, player, LEAST, rank)
            counts = {
                name: int(max(LEAST, min(MOST, BURST_SECONDS / seconds(pattern, player, LEAST, rank))))
                for name, player in players.items()
            }
            times: dict[str, list[float]] = {name: [] for name in players}
            order = list(players)
            for _ in range(arguments.rounds):
                order = order[1:] + order[:1]
                for name in order:
                    times[name].append(seconds(pattern, players[name], counts[name], rank))
                    wrong += not is_right(players[name], x, rank)
            for name, samples in times.items():
                middle = statistics.median(samples)
                row = {"bytes": nbytes, "pattern": pattern, "contender": name, "us": 1e6 * middle}
                row |= {"least": 1e6 * min(samples), "greatest": 1e6 * max(samples), "GB/s": nbytes / middle / 1e9}
                rows.append(row)
            if rank == 0:
                show(rows[-len(times) :])
        del players
    wrong = world.allreduce(wrong)
    if rank == 0 and arguments.out:
        where = "one node" if comm.one_node else "two hosts"
        record.write(arguments.out, "channel", facts, arguments, where=where, wrong=wrong, rows=rows)
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


def show(rows: list[dict[str, Any]]) -> None:
    """Print the times of one size and pattern, and the channel's speed-up over MPI's contenders."""
    by_name = {row["contender"]: row["us"] for row in rows}
    text = "  ".join(f"{name} {us:.2f}" for name, us in by_name.items())
    ratios = [
        f"{by_name[peer] / by_name['channel']:.2f} x {peer}"
        for peer in ("MPI persistent", "MPI Send/Recv")
        if peer in by_name and "channel" in by_name
    ]
    print(f"{rows[0]['bytes']:>9} B {rows[0]['pattern']:<9} us: {text}  | channel is {', '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
