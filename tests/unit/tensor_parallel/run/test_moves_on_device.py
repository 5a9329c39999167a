"""Moves of arrays on a device are those of the host, bit for bit. Ranks are threads on the late device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import MismatchError, UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel import COPY, REDUCE, all_to_all, gather, reduce_scatter, scatter
from commlib.tensor_parallel.moves import Redistribute
from commlib.tensor_parallel.run.moves import run as move_on
from tests.bodies import loopback
from tests.late import LATE

SHAPE = (3, 7, 5)
SIZES = (1, 2, 3)


@pytest.fixture(autouse=True)
def well_behaved(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(LATE, "has_signals", True)
    races = LATE.races
    yield
    assert LATE.races == races


def run(size: int, function: Callable[[Communicator], None]) -> None:
    def there(comm: Communicator) -> None:
        with LATE.using(LATE.stream()):
            function(comm)

    loopback.run(size, there, config=Config(timeout=10, device_slot_kib=64))


def check(axis: ParallelAxis, move: Redistribute, x: Any, *, may_write: bool = False) -> Redistribute:
    """Compare both moves, and return the move with its lengths."""
    array = LATE.wrap(LATE.put(x), "x")
    result, known = move_on(axis, move, array, may_write=may_write)
    expected, same = move_on(axis, move, x.copy())
    assert known == same
    assert result.shape == expected.shape
    assert (result is array) == (may_write or move is COPY or (axis.size == 1 and move.name != "all_to_all"))
    np.testing.assert_array_equal(
        LATE.fetch(LATE.at(result.address, result.shape, result.dtype, result.owner)), expected
    )
    return known


def own(rank: int, *shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(rank).integers(-8, 8, shape).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_moves_along_one_dimension_match_the_host(size: int, dim: int) -> None:
    """Evenly: the first ranks may have more. And the inverse, which has the lengths of all shards."""

    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        for dtype in ("float32", "int8", "float64"):
            whole = own(comm.rank, *SHAPE, dtype=dtype)
            check(axis, scatter(dim), whole)
            known = check(axis, reduce_scatter(dim), whole)
            length = even(SHAPE[dim], size).counts[comm.rank]
            shard = own(comm.rank, *(length if n == dim % 3 else long for n, long in enumerate(SHAPE)), dtype=dtype)
            for move in (known.conjugate, gather(dim), gather(dim, partial=True)):
                check(axis, move, shard)

    run(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("divide", "join"), [(0, 1), (1, 0), (2, 0), (0, 2), (1, 2), (-1, 1)])
def test_exchanges_of_dimensions_match_the_host(size: int, divide: int, join: int) -> None:
    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        for joined in (4, 1 + comm.rank):
            shape = list(SHAPE)
            shape[join] = joined
            known = check(axis, all_to_all(divide, join), own(comm.rank, *shape))
            back = [*shape]
            back[divide] = even(SHAPE[divide], size).counts[comm.rank]
            back[join] = sum(known.joined)
            check(axis, known.conjugate, own(comm.rank, *back))

    run(size, body)


@pytest.mark.parametrize("size", (2, 3))
def test_shards_of_any_lengths_match_the_host(size: int) -> None:
    """Some have none."""
    lengths = (0, *(4,) * (size - 1))

    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        check(axis, gather(1), own(comm.rank, 3, lengths[comm.rank], 5))
        check(axis, reduce_scatter(1, lengths), own(comm.rank, 3, sum(lengths), 5))
        check(axis, scatter(1, lengths), own(comm.rank, 3, sum(lengths), 5))

    run(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_whole_arrays_match_the_host(size: int) -> None:
    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)
        check(axis, COPY, own(comm.rank, *SHAPE))
        check(axis, REDUCE, own(comm.rank, *SHAPE))
        check(axis, REDUCE, own(comm.rank, *SHAPE), may_write=True)
        check(axis, REDUCE, own(comm.rank, 0, 3))

    run(size, body)


def test_encoded_moves_go_through_the_host() -> None:
    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm, "bf16")
        for move in (REDUCE, gather(1), reduce_scatter(0), all_to_all(0, 1), scatter(2)):
            check(axis, move, own(comm.rank, 4, 4, 4))

    run(2, body)


def test_mismatched_arrays_are_refused() -> None:
    def body(comm: Communicator) -> None:
        axis = ParallelAxis(comm)

        def array(*shape: int) -> Any:
            return LATE.wrap(LATE.put(own(comm.rank, *shape)), "x")

        for move, why in (
            (gather(3), "has no dimension 3"),
            (gather(0, lengths=(2, 2)), "gather: shards of"),
            (reduce_scatter(0, (2, 2)), "along dimension 0 do not fit shape"),
            (all_to_all(1, -2), "cannot be both split and joined"),
        ):
            with pytest.raises(UsageError, match=why):
                move_on(axis, move, array(*SHAPE))
        with pytest.raises(MismatchError):
            move_on(axis, gather(0), array(2, 5 + comm.rank))
        check(axis, gather(0), own(comm.rank, 2, 5))

    run(2, body)
