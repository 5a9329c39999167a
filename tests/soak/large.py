"""Large: each verb once on more bytes, and more elements, than 32 bits count.

    mpiexec -n 2 python -m tests.soak.large              all of it: up to 9 GiB at a time on 2 ranks
    mpiexec -n 2 python -m tests.soak.large all_reduce   some of it
    COMMLIB_NODE_PATH=0 mpiexec -n 2 ...                 by messages

Every element is a byte. Arrays are compared with numpy's results, completely, piece by piece.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import commlib

MORE = (1 << 31) + 4099
_PERIOD, _PERIODS = 65_521, 64


def _pattern(rank: int, offset: int = 0) -> Any:
    """Return a rank's data from an offset on, as many periods as fit into some MiB."""
    period = (np.arange(offset, offset + _PERIOD) % _PERIOD % 7 + rank).astype(np.int8)
    return np.tile(period, _PERIODS)


def _pieces(x: Any, length: int) -> Iterator[Any]:
    return (x[start : start + length] for start in range(0, len(x), length))


def filled(length: int, rank: int, x: Any = None) -> Any:
    """Return bytes that differ from place to place, with a period that is no power of two, and from rank to rank."""
    x, pattern = np.empty(length, np.int8) if x is None else x, _pattern(rank)
    for piece in _pieces(x, len(pattern)):
        piece[:] = pattern[: len(piece)]
    return x


def check(actual: Any, *expected: tuple[int, int, Any]) -> None:
    """Compare parts [start, stop) of an array with a pattern from the same offset."""
    for start, stop, pattern in expected:
        for number, piece in enumerate(_pieces(actual[start:stop], len(pattern))):
            assert np.array_equal(piece, pattern[: len(piece)]), (start + number * len(pattern), len(piece))


of = _pattern


def total(size: int, offset: int = 0) -> Any:
    """Return the sum of all ranks' data from an offset on."""
    return sum(_pattern(rank, offset) for rank in range(size))


def all_reduce(comm: Any, n: int) -> None:
    x = filled(n, comm.rank)
    check(comm.all_reduce(x, out=x), (0, n, total(comm.size)))


def symmetric_all_reduce(comm: Any, n: int) -> None:
    x = filled(n, comm.rank, comm.empty(n, "int8"))
    check(comm.all_reduce(x, out=x), (0, n, total(comm.size)))


def reduce(comm: Any, n: int) -> None:
    actual = comm.reduce(filled(n, comm.rank), root=1)
    if comm.rank == 1:
        check(actual, (0, n, total(comm.size)))


def reduce_scatter(comm: Any, n: int) -> None:
    n = n // comm.size * comm.size
    share = n // comm.size
    check(comm.reduce_scatter(filled(n, comm.rank)), (0, share, total(comm.size, comm.rank * share)))


def broadcast(comm: Any, n: int) -> None:
    x = filled(n, comm.rank)
    check(comm.broadcast(x, root=1), (0, n, of(1)))


def symmetric_broadcast(comm: Any, n: int) -> None:
    x = filled(n, comm.rank, comm.empty(n, "int8"))
    check(comm.broadcast(x, root=1), (0, n, of(1)))


def all_gather(comm: Any, n: int) -> None:
    share = n // comm.size + 1
    actual = comm.all_gather(filled(share, comm.rank))
    check(actual, *((rank * share, (rank + 1) * share, of(rank)) for rank in range(comm.size)))


def all_gather_v(comm: Any, n: int) -> None:
    actual = comm.all_gather_v(filled(5 if comm.rank else n, comm.rank))
    check(actual, (0, n, of(0)), *((n + 5 * (r - 1), n + 5 * r, of(r)) for r in range(1, comm.size)))


def gather(comm: Any, n: int) -> None:
    share = n // comm.size + 1
    actual = comm.gather(filled(share, comm.rank), root=0)
    if comm.rank == 0:
        check(actual, *((rank * share, (rank + 1) * share, of(rank)) for rank in range(comm.size)))


def scatter(comm: Any, n: int) -> None:
    share = n // comm.size + 1
    actual = comm.scatter(
        filled(share * comm.size, 3) if comm.rank == 0 else np.empty(share * comm.size, np.int8), root=0
    )
    check(actual, (0, share, of(3, comm.rank * share)))


def all_to_all(comm: Any, n: int) -> None:
    share = n // comm.size + 1
    actual = comm.all_to_all(filled(share * comm.size, comm.rank))
    check(actual, *((rank * share, (rank + 1) * share, of(rank, comm.rank * share)) for rank in range(comm.size)))


def all_to_all_v(comm: Any, n: int) -> None:
    """The last rank's part begins beyond the range of 32 bits, on the sender and on the receiver."""
    splits = [n] + [5] * (comm.size - 1) if comm.rank == 0 else [0] * (comm.size - 1) + [7]
    x = filled(sum(splits), comm.rank)
    actual = comm.all_to_all_v(x, splits)
    actual = actual[0] if isinstance(actual, tuple) else actual
    if comm.rank == 0:
        check(actual, (0, n, of(0)))
    elif comm.rank == comm.size - 1:
        check(
            actual,
            (0, 5, of(0, n + 5 * (comm.size - 2))),
            *((5 + 7 * r, 12 + 7 * r, of(r + 1)) for r in range(comm.size - 1)),
        )


def send_recv(comm: Any, n: int) -> None:
    if comm.rank == 0:
        comm.send(filled(n, 0), 1)
    elif comm.rank == 1:
        x = np.empty(n, np.int8)
        comm.recv(x, 0)
        check(x, (0, n, of(0)))


def channel(comm: Any, n: int) -> None:
    if comm.rank > 1:
        return
    edge = comm.channel(1 - comm.rank, "large", n, "int8", depth=1)
    if comm.rank == 0:
        edge.send(filled(n, 0))
    else:
        check(edge.recv(), (0, n, of(0)))


CASES = {
    case.__name__: case
    for case in (
        all_reduce, symmetric_all_reduce, broadcast, symmetric_broadcast, reduce, reduce_scatter, all_gather,
        all_gather_v, gather, scatter, all_to_all, all_to_all_v, send_recv, channel,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(CASES)} (default: all)")
    parser.add_argument("--bytes", type=int, default=MORE, help="of the longest array")
    names = parser.parse_args()
    if unknown := set(names.cases) - CASES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    comm = commlib.init()
    for name in names.cases or CASES:
        comm.barrier()
        began = time.perf_counter()
        CASES[name](comm, names.bytes)
        gc.collect()
        comm.barrier()
        if comm.rank == 0:
            print(f"{name}: right, in {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
