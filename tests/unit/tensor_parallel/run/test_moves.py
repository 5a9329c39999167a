"""Moves on arrays: against the whole array, cut and joined by numpy; lengths known, even or requested; encoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import MismatchError, UsageError
from commlib.schedule.layout import even, uneven
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shards import Shard, part
from commlib.tensor_parallel import COPY, REDUCE, Sharding, all_to_all, gather, reduce_scatter, scatter
from commlib.tensor_parallel.run.moves import run as move_on
from commlib.tensor_parallel.run.moves import start
from tests.bodies.loopback import run

SHAPE = (3, 7, 5)
WHOLE = np.random.default_rng(0).integers(-8, 8, SHAPE).astype(np.float64)
SIZES = (1, 2, 3, 4)


def cut(array: Array, dim: int, lengths: tuple[int, ...], rank: int) -> Array:
    start, stop = uneven(lengths).slice_of(rank)
    return array.take(range(start, stop), dim)


def equal(got: Array, expected: Array) -> None:
    np.testing.assert_array_equal(got, expected)
    assert got.flags.c_contiguous
    assert got.dtype == expected.dtype


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_shards_are_scattered_and_gathered(size: int, dim: int) -> None:
    lengths = even(SHAPE[dim], size).counts

    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        shard, known = move_on(axis, scatter(dim), WHOLE)
        equal(shard, cut(WHOLE, dim, lengths, comm.rank))
        for move in (known.conjugate, gather(dim), gather(dim, partial=True)):
            equal(move_on(axis, move, shard)[0], WHOLE)

    run(size, body)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_any_lengths_are_joined(size: int, dim: int) -> None:
    """The conjugate has their lengths."""
    lengths = (1, *(0,) * (size - 2), SHAPE[dim] - 1)

    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        shard = cut(WHOLE, dim, lengths, comm.rank)
        whole, known = move_on(axis, gather(dim, partial=True), shard)
        equal(whole, WHOLE)
        equal(move_on(axis, known.conjugate, whole)[0], shard * size)

    run(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_moves_reduce(size: int) -> None:
    def body(comm: Communicator) -> None:
        axis, own = ParallelAxis(comm), WHOLE * (comm.rank + 1)
        total = WHOLE * sum(range(1, size + 1))
        equal(move_on(axis, REDUCE, own)[0], total)
        equal(start(axis, REDUCE, own)(), total)
        equal(move_on(axis, REDUCE, own.transpose(2, 0, 1))[0], np.ascontiguousarray(total.transpose(2, 0, 1)))
        written = own.copy()
        assert move_on(axis, REDUCE, written, may_write=True)[0] is written
        equal(written, total)
        assert move_on(axis, COPY, own)[0] is own

    run(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_moves_reduce_and_scatter(size: int, dim: int) -> None:
    def body(comm: Communicator) -> None:
        axis, own = ParallelAxis(comm), WHOLE * (comm.rank + 1)
        total = WHOLE * sum(range(1, size + 1))
        lengths = (SHAPE[dim], *(0,) * (size - 1))  # all to rank 0
        for move, expected in (
            (reduce_scatter(dim), even(SHAPE[dim], size).counts),
            (reduce_scatter(dim, lengths), lengths),
        ):
            equal(move_on(axis, move, own)[0], cut(total, dim, expected, comm.rank))
            equal(start(axis, move, own)(), cut(total, dim, expected, comm.rank))

    run(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("divide", "join"), [(0, 1), (1, 0), (2, 1), (-1, 0)])
def test_moves_exchange_dimensions(size: int, divide: int, join: int) -> None:
    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        before = cut(WHOLE, join, even(SHAPE[join], size).counts, comm.rank)
        after, known = move_on(axis, all_to_all(divide, join), before)
        equal(after, cut(WHOLE, divide, even(SHAPE[divide], size).counts, comm.rank))
        equal(move_on(axis, known.conjugate, after)[0], before)

    run(size, body)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_moves_can_be_encoded(size: int, codec: str) -> None:
    """Small integers travel exactly in bf16; int8 has 127 steps up to the largest, and sums are sent twice."""

    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm, codec)
        own = (WHOLE * (comm.rank + 1)).astype(np.float32)
        total = WHOLE.astype(np.float32) * sum(range(1, size + 1))
        step = 0 if codec == "bf16" else np.abs(total).max() / 127
        near(move_on(axis, REDUCE, own)[0], total, 2 * step)
        near(move_on(axis, reduce_scatter(1), own)[0], cut(total, 1, even(7, size).counts, comm.rank), step)
        shard = cut(own, 1, even(7, size).counts, comm.rank)
        ones = [cut(WHOLE * (rank + 1), 1, even(7, size).counts, rank) for rank in range(size)]
        near(move_on(axis, gather(1), shard)[0], np.concatenate(ones, 1), step)
        swapped, known = move_on(axis, all_to_all(2, 1), shard)
        near(swapped, cut(np.concatenate(ones, 1), 2, even(5, size).counts, comm.rank), step)
        near(move_on(axis, known.conjugate, swapped)[0], shard, 2 * step)
        ids = np.arange(6).reshape(2, 3) + comm.rank
        equal(move_on(axis, REDUCE, ids)[0], np.arange(6).reshape(2, 3) * size + sum(range(size)))

    run(size, body)


def near(got: Array, expected: Any, most: float) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= most * 1.01


ONE_MORE = {
    "reduce": (REDUCE, (3, 4), (3, 5)),
    "reduce, as many elements": (REDUCE, (3, 4), (4, 3)),
    "gather": (gather(0), (2, 3), (2, 4)),
    "gather of other lengths": (gather(0), (2, 3), (1, 4)),
    "reduce_scatter": (reduce_scatter(0), (6, 3), (7, 3)),
    "all_to_all": (all_to_all(0, 1), (4, 3), (6, 2)),
    "all_to_all, as many elements": (all_to_all(0, 1), (2, 3, 4), (4, 3, 2)),
}


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize(
    ("what", "codec"),
    [
        (what, codec)
        for what in ONE_MORE
        for codec in (None, "bf16")
        if codec or what != "reduce, as many elements"  # plain sums of equal lengths are not distinguished
    ],
)
def test_a_different_shape_is_an_error(what: str, codec: str | None, size: int) -> None:
    """In an all_to_all, and in encoded moves, ranks used wrong numbers, or one rank failed alone."""
    move, usual, other = ONE_MORE[what]

    def body(comm: Communicator) -> None:
        x = np.ones(other if comm.rank == size - 1 else usual, np.float32)
        with pytest.raises(MismatchError, match=f"rank.* {size - 1}"):
            move_on(ParallelAxis(comm, codec), move, x)

    run(size, body)


@pytest.mark.parametrize("move", [REDUCE, gather(0), reduce_scatter(0), all_to_all(0, 1)], ids=lambda move: move.name)
@pytest.mark.parametrize("theirs", [("float64", "bf16"), ("float32", "fp8"), ("float32", None)], ids=str)
def test_a_different_codec_or_dtype_is_an_error(move: Any, theirs: Any) -> None:
    def body(comm: Communicator) -> None:
        dtype, codec = theirs if comm.rank else ("float32", "bf16")
        with pytest.raises(MismatchError):
            move_on(ParallelAxis(comm, codec), move, np.ones((4, 6), dtype))

    run(2, body)


def test_every_rank_decodes_the_same_sum() -> None:
    def body(comm: Communicator) -> bytes:
        x = np.random.default_rng(comm.rank).standard_normal((5, 33)).astype(np.float32)
        return bytes(move_on(ParallelAxis(comm, "int8"), REDUCE, x)[0].tobytes())

    assert len(set(run(3, body))) == 1


def test_a_weight_is_cut_and_joined() -> None:
    whole = np.arange(60.0).reshape(3, 20)
    sharding = Sharding(whole.shape, 1, parts=(12, 4, 4), units=4)

    def body(comm: Communicator) -> None:
        shard = Shard(ParallelAxis(comm), sharding)
        own = shard.own(whole)
        equal(own, part(whole, sharding, comm.rank, comm.size))
        assert own.shape == sharding.local(comm.rank, comm.size)
        equal(shard.whole(own), whole)

    for size in SIZES:
        run(size, body)


def test_wrong_arguments_are_refused() -> None:
    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        with pytest.raises(UsageError, match="has no dimension 3"):
            move_on(axis, scatter(3), WHOLE)
        with pytest.raises(UsageError, match=r"shard lengths \(1, 1\) along dimension 1 do not fit shape"):
            move_on(axis, reduce_scatter(1, (1, 1)), WHOLE)
        with pytest.raises(UsageError, match="cannot be both split and joined"):
            move_on(axis, all_to_all(2, -1), WHOLE)
        with pytest.raises(UsageError, match="expected a Communicator"):
            ParallelAxis("tp")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="needs a fixed length"):
            ParallelAxis(comm, "topk:ratio=0.1")

    run(2, body)
