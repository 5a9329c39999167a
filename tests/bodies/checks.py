"""One check for each verb, for any transport: call it on all ranks and compare with numpy, to the last bit.

`comm` may be a Communicator, or `Twins(comm)`, which makes the same calls through the `_async` twins.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import NUMPY
from commlib.runtime.work import Work
from tests.oracles.oracle import assert_same, combined, values


class Twins:
    """A Communicator whose verbs are started and waited for."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm

    def __getattr__(self, verb: str) -> Any:
        start = getattr(self._comm, f"{verb}_async")

        def run(*args: Any, **options: Any) -> Any:
            work = start(*args, **options)
            assert isinstance(work, Work)
            result = work.wait()
            assert work.done() and work.exception() is None and work.result() is result
            return result

        return run


def inputs(comm: Any, dtype: str, shape: tuple[int, ...], salt: str = "") -> list[Any]:
    """Return every rank's input, the same lists on all ranks."""
    return [values(dtype, shape, zlib.crc32(f"{dtype} {shape} {salt} {rank}".encode())) for rank in range(comm.size)]


def all_reduce(comm: Any, dtype: str, shape: tuple[int, ...], op: str = "sum", algorithm: str = "auto") -> None:
    xs = inputs(comm, dtype, shape, op)
    x, out, expected = xs[comm.rank].copy(), np.empty(shape, NUMPY[dtype]), combined(xs, op)
    assert_same(comm.all_reduce(x, op, algorithm=algorithm), expected)
    assert comm.all_reduce(x, op, out=out, algorithm=algorithm) is out
    assert_same(out, expected)
    assert_same(x, xs[comm.rank])
    assert comm.all_reduce(x, op, out=x, algorithm=algorithm) is x
    assert_same(x, expected)


def reduce_scatter(comm: Any, dtype: str, shape: tuple[int, ...], op: str = "sum", algorithm: str = "auto") -> None:
    xs = inputs(comm, dtype, shape, op)
    x, expected = xs[comm.rank].copy(), np.array_split(combined(xs, op), comm.size)[comm.rank]
    assert_same(comm.reduce_scatter(x, op, algorithm=algorithm), expected)
    out = np.empty_like(expected)
    assert comm.reduce_scatter(x, op, out=out, algorithm=algorithm) is out
    assert_same(out, expected)
    assert_same(x, xs[comm.rank])


def reduce_scatter_v(
    comm: Any, dtype: str, counts: list[int], row: tuple[int, ...] = (), op: str = "sum", algorithm: str = "auto"
) -> None:
    xs = inputs(comm, dtype, (sum(counts), *row), op)
    x, expected = xs[comm.rank].copy(), np.split(combined(xs, op), np.cumsum(counts)[:-1])[comm.rank]
    assert_same(comm.reduce_scatter_v(x, counts, op, algorithm=algorithm), expected)
    out = np.empty_like(expected)
    assert comm.reduce_scatter_v(x, counts, op, out=out, algorithm=algorithm) is out
    assert_same(out, expected)
    assert_same(x, xs[comm.rank])


def scan(comm: Any, dtype: str, shape: tuple[int, ...], op: str = "sum") -> None:
    xs = inputs(comm, dtype, shape, op)
    x, out = xs[comm.rank].copy(), np.empty(shape, NUMPY[dtype])
    upto = combined(xs[: comm.rank + 1], op)
    assert_same(comm.scan(x, op), upto)
    assert comm.scan(x, op, out=out) is out
    assert_same(out, upto)
    assert_same(x, xs[comm.rank])
    before = comm.exscan(x, op)
    result = comm.exscan(x, op, out=x)
    if comm.rank:
        assert result is x
        assert_same(before, combined(xs[: comm.rank], op))
        assert_same(x, before)
    else:
        assert before is None and result is None
        assert_same(x, xs[0])


def reduce(
    comm: Any, dtype: str, shape: tuple[int, ...], op: str = "sum", root: int = 0, algorithm: str = "auto"
) -> None:
    xs = inputs(comm, dtype, shape, op)
    x, expected = xs[comm.rank].copy(), combined(xs, op)
    result = comm.reduce(x, op, root, algorithm=algorithm)
    assert_same(x, xs[comm.rank])
    in_place = comm.reduce(x, op, root, out=x if comm.rank == root else None, algorithm=algorithm)
    if comm.rank == root:
        assert_same(result, expected)
        assert in_place is x
        assert_same(x, expected)
    else:
        assert result is None and in_place is None
        assert_same(x, xs[comm.rank])


def broadcast(comm: Any, dtype: str, shape: tuple[int, ...], root: int = 0, algorithm: str = "auto") -> None:
    xs = inputs(comm, dtype, shape)
    x = xs[comm.rank].copy()
    x.flags.writeable = comm.rank != root  # the root's is only read
    assert comm.broadcast(x, root, algorithm=algorithm) is x
    assert_same(x, xs[root])


def all_gather(comm: Any, dtype: str, shape: tuple[int, ...], algorithm: str = "auto") -> None:
    xs = inputs(comm, dtype, shape)
    x, expected = xs[comm.rank].copy(), np.concatenate([np.atleast_1d(x) for x in xs])
    assert_same(comm.all_gather(x, algorithm=algorithm), expected)
    out = np.empty_like(expected)
    assert comm.all_gather(x, out=out, algorithm=algorithm) is out
    assert_same(out, expected)
    assert_same(x, xs[comm.rank])


def gather(comm: Any, dtype: str, shape: tuple[int, ...], root: int = 0, algorithm: str = "auto") -> None:
    xs = inputs(comm, dtype, shape)
    x, expected = xs[comm.rank].copy(), np.concatenate([np.atleast_1d(x) for x in xs])
    result = comm.gather(x, root, algorithm=algorithm)
    out = np.empty_like(expected) if comm.rank == root else None
    assert comm.gather(x, root, out=out, algorithm=algorithm) is out
    assert_same(x, xs[comm.rank])
    if out is None:
        assert result is None
    else:
        assert_same(result, expected)
        assert_same(out, expected)


def scatter(comm: Any, dtype: str, part: tuple[int, ...], root: int = 0, algorithm: str = "auto") -> None:
    """`part` is the shape of each rank's part."""
    xs = inputs(comm, dtype, (comm.size * part[0], *part[1:]))
    expected = xs[root][part[0] * comm.rank : part[0] * (comm.rank + 1)]
    x = xs[root].copy() if comm.rank == root else None
    assert_same(comm.scatter(x, root, algorithm=algorithm), expected)
    out = np.empty_like(expected)
    assert comm.scatter(x, root, out=out, algorithm=algorithm) is out
    assert_same(out, expected)
    if x is not None:
        assert_same(x, xs[root])


def all_to_all(comm: Any, dtype: str, part: tuple[int, ...], algorithm: str = "auto") -> None:
    """`part` is the shape of the data from each rank to each rank."""
    xs = inputs(comm, dtype, (comm.size * part[0], *part[1:]))
    x = xs[comm.rank].copy()
    expected = np.concatenate([sent[part[0] * comm.rank : part[0] * (comm.rank + 1)] for sent in xs])
    assert_same(comm.all_to_all(x, algorithm=algorithm), expected)
    assert_same(x, xs[comm.rank])
    assert comm.all_to_all(x, out=x, algorithm=algorithm) is x
    assert_same(x, expected)


def all_gather_v(comm: Any, dtype: str, lengths: list[int], row: tuple[int, ...] = ()) -> None:
    """`lengths[r]` is the length of dimension 0 on rank r, `row` the rest of the shape."""
    xs = [values(dtype, (length, *row), rank) for rank, length in enumerate(lengths)]
    x = xs[comm.rank].copy()
    assert_same(comm.all_gather_v(x), np.concatenate(xs))
    assert_same(x, xs[comm.rank])


def all_to_all_v(comm: Any, dtype: str, splits: list[list[int]], row: tuple[int, ...] = ()) -> None:
    """`splits[a][b]` rows go from rank a to rank b."""
    xs = [values(dtype, (sum(splits[rank]), *row), rank) for rank in range(comm.size)]
    parts = [np.split(x, np.cumsum(splits[rank])[:-1]) for rank, x in enumerate(xs)]
    x = xs[comm.rank].copy()
    expected = np.concatenate([sent[comm.rank] for sent in parts])
    takes = [splits[rank][comm.rank] for rank in range(comm.size)]
    for known in (None, takes):
        for out in (None, np.empty_like(expected)):
            received, lengths = comm.all_to_all_v(x, splits[comm.rank], takes=known, out=out)
            assert out is None or received is out
            assert_same(received, expected)
            assert_same(lengths, np.array(takes, np.int64))
            assert_same(x, xs[comm.rank])


def send_recv(comm: Any, dtype: str, shape: tuple[int, ...], tag: int = 0) -> None:
    """Pass around a ring."""
    xs = inputs(comm, dtype, shape)
    out = np.empty(shape, NUMPY[dtype])
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    assert comm.send_recv(xs[comm.rank], right, out, left, tag) is out
    assert_same(out, xs[left])


def send_and_recv(comm: Any, dtype: str, shape: tuple[int, ...], tag: int = 0) -> None:
    """Every even rank sends to the next rank, which sends it back."""
    if comm.rank ^ 1 >= comm.size:
        return
    x, other = values(dtype, shape, 5), np.empty(shape, NUMPY[dtype])
    if comm.rank % 2 == 0:
        comm.send(x, comm.rank + 1, tag)
        assert comm.recv(other, comm.rank + 1, tag) is other
    else:
        comm.recv(other, comm.rank - 1, tag)
        comm.send(other, comm.rank - 1, tag)
    assert_same(other, x)


def objects(comm: Any, root: int = 0) -> None:
    mine = {"rank": comm.rank, "text": "x" * (100 * comm.rank), "array": np.arange(comm.rank)}
    everyone = comm.all_gather_object(mine)
    assert [value["rank"] for value in everyone] == list(range(comm.size))
    assert [len(value["text"]) for value in everyone] == [100 * rank for rank in range(comm.size)]
    received = comm.broadcast_object(mine if comm.rank == root else None, root)
    assert received["rank"] == root and len(received["array"]) == root


def async_twins(comm: Any) -> None:
    """Every verb once through its `_async` twin."""
    every_verb(Twins(comm))


def every_verb(twins: Any) -> None:
    """Every verb once."""
    last = twins.size - 1
    all_reduce(twins, "bfloat16", (5000,), "mean")
    all_reduce(twins, "float32", (5,), "max", "ring")
    reduce_scatter(twins, "int8", (7, 3), "mean")
    reduce_scatter_v(twins, "int8", [rank + 1 for rank in range(twins.size)], (3,), "mean")
    scan(twins, "bfloat16", (5000,))
    reduce(twins, "uint64", (7,), "prod", root=last)
    broadcast(twins, "bool", (7,), root=last)
    all_gather(twins, "bfloat16", (7,))
    gather(twins, "float16", (7,))
    scatter(twins, "complex64", (2, 3))
    all_to_all(twins, "int32", (2, 3))
    all_gather_v(twins, "int32", list(range(twins.size)))
    all_to_all_v(twins, "int32", [[1] * twins.size] * twins.size)
    send_recv(twins, "bfloat16", (7,))
    objects(twins, root=last)
    assert twins.barrier() is None
