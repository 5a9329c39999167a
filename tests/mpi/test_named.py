"""Named operations under MPI: every verb, dtype and rule of Horovod's, on arrays."""

from __future__ import annotations

import json
import random
from time import time
from typing import Any

import numpy as np
import pytest

import commlib
from commlib import horovod as hvd
from commlib.dtypes import NUMPY
from commlib.errors import MismatchError, UsageError

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
ALL = [*FLOATS, *INTEGERS, "bool", "complex64"]


@pytest.fixture(autouse=True)
def _running(comm: Any) -> None:
    hvd.init()


def values(rank: int, dtype: str, shape: tuple[int, ...] = (3, 2)) -> Any:
    """Return small whole numbers, different ones on every rank: exact in every dtype."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 5 + rank
    return (numbers % 2 == 0) if dtype == "bool" else numbers.astype(NUMPY[dtype])


def everyone(dtype: str, **options: Any) -> list[Any]:
    return [values(rank, dtype, **options) for rank in range(hvd.size())]


def same(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)


def reduced(array: Any, name: str | None = None, **options: Any) -> Any:
    return hvd.start_allreduce([array], [np.empty_like(array)], name, **options).wait()[0]


@pytest.mark.parametrize("dtype", ALL)
def test_allreduce_sum(dtype: str) -> None:
    mine, parts = values(hvd.rank(), dtype), everyone(dtype)
    same(
        reduced(mine, op=hvd.Sum), np.any(parts, 0) if dtype == "bool" else sum(parts[1:], parts[0]).astype(mine.dtype)
    )
    same(mine, parts[hvd.rank()])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce_other_operations(op: Any, dtype: str) -> None:
    stacked = np.stack(everyone(dtype)).astype(np.float64)
    expected = {
        hvd.Average: stacked.mean(0), hvd.Min: stacked.min(0), hvd.Max: stacked.max(0), hvd.Product: stacked.prod(0),
    }[op]  # fmt: skip
    if dtype == "int32":
        expected = np.trunc(expected)
    same(reduced(values(hvd.rank(), dtype), op=op), expected.astype(NUMPY[dtype]))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("count", [3, 40_000])
def test_means_whose_sum_overflows(dtype: str, count: int) -> None:
    """It wrapped around, by name as in order."""
    top = np.iinfo(dtype).max
    parts = [np.full(count, top - rank, dtype) for rank in range(hvd.size())]
    expected = sum(int(part[0]) for part in parts) // hvd.size()
    same(reduced(parts[hvd.rank()], op=hvd.Average), np.full(count, expected, dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize("grouped", [False, True])
def test_scales(dtype: str, grouped: bool) -> None:
    mine = [values(hvd.rank(), dtype), values(hvd.rank(), dtype, (4,))][: 1 + grouped]
    results = hvd.start_allreduce(
        mine, [np.empty_like(x) for x in mine], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
    ).wait()
    for array, result in zip(mine, results, strict=True):
        parts = [values(rank, dtype, array.shape).astype(np.float64) * 0.5 for rank in range(hvd.size())]
        if dtype == "int32":
            parts = [np.trunc(part) for part in parts]
        same(result, (sum(parts) * 4).astype(NUMPY[dtype]))
    average = reduced(mine[0], op=hvd.Average, postscale_factor=3.0)
    total = sum(part.astype(np.float64) for part in everyone(dtype)) * (3.0 / hvd.size())
    if dtype == "int32":
        same(average, np.trunc(total).astype(np.int32))
    else:
        # Two more roundings than in the oracle: of the mean, and of its product.
        np.testing.assert_allclose(average.astype(np.float64), total, rtol=2 * EPSILON[dtype])


def test_a_group_of_several_dtypes_in_place() -> None:
    arrays = [values(hvd.rank(), dtype, (n,)) for n, dtype in enumerate(["float32", "int64", "bfloat16", "float32"], 1)]
    expected = [sum(values(r, str(a.dtype), a.shape) for r in range(hvd.size())).astype(a.dtype) for a in arrays]
    results = hvd.start_allreduce(arrays, arrays, "group", op=hvd.Sum).wait()
    for array, one, other in zip(arrays, results, expected, strict=True):
        assert array is one
        same(one, other)


@pytest.mark.parametrize("dtype", ALL)
def test_movement(dtype: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    parts = everyone(dtype)
    rows = [part[: r % 3] for r, part in enumerate(parts)]  # rank 0 gives none
    (gathered,) = hvd.start_allgather([rows[rank]]).wait()
    same(gathered, np.concatenate(rows))
    target = [parts[rank].copy(), values(rank, dtype, (2,))]
    hvd.start_broadcast(target, size - 1).wait()
    same(target[0], parts[-1])
    same(target[1], values(size - 1, dtype, (2,)))
    sent = values(rank, dtype, (2 * size, 1))
    received, counts = hvd.start_alltoall(sent).wait()
    same(received, np.concatenate([values(r, dtype, (2 * size, 1))[2 * rank : 2 * rank + 2] for r in range(size)]))
    assert counts.tolist() == [2] * size
    splits = np.array([(rank + peer) % 3 for peer in range(size)])
    received, counts = hvd.start_alltoall(values(rank, dtype, (3 * size, 2)), splits).wait()
    assert counts.tolist() == [(peer + rank) % 3 for peer in range(size)]
    starts = [sum((peer + before) % 3 for before in range(rank)) for peer in range(size)]
    blocks = [values(p, dtype, (3 * size, 2))[starts[p] : starts[p] + n] for p, n in enumerate(counts)]
    same(received, np.concatenate(blocks))


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_reducescatter(dtype: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = [values(rank, dtype, (size + 1, 2)), values(rank, dtype, (size * 2,))]
    got = hvd.start_reducescatter(mine, op=hvd.Sum).wait()
    for array, part in zip(mine, got, strict=True):
        total = sum(values(r, dtype, array.shape) for r in range(size)).astype(array.dtype)
        same(part, np.array_split(total, size)[rank])
    (half,) = hvd.start_reducescatter(mine[:1], op=hvd.Average, postscale_factor=size * 1.0).wait()
    np.testing.assert_array_equal(half, got[0])


def test_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"from": rank}, size - 1) == {"from": size - 1}
    assert hvd.allgather_object([rank]) == [[r] for r in range(size)]
    with pytest.raises((TypeError, AttributeError)):
        hvd.allgather_object(lambda: 0)  # before it has notified any rank
    hvd.start_barrier().wait()


def test_thousands_of_operations_in_a_different_order_on_every_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    names = list(range(2000))
    arrays = [np.full(1 + n % 50, n + rank, ["float32", "float64", "int32"][n % 3]) for n in names]
    for round_number in range(3):
        for n in names:
            arrays[n][...] = n + rank + round_number
        order = names[:]
        random.Random(100 * round_number + rank).shuffle(order)
        works = [hvd.start_allreduce([arrays[n]], [arrays[n]], f"many {n}", op=hvd.Sum) for n in order]
        for work in works:
            work.wait()
        for n in names:
            assert (arrays[n] == size * (n + round_number) + size * (size - 1) // 2).all()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "what, call",
    [
        ("shape", lambda r: hvd.start_allreduce([np.ones(2 + r)], [np.ones(2 + r)], "w")),
        ("dtype", lambda r: hvd.start_allgather([np.ones(2, "f4" if r else "f8")], "w")),
        ("shape", lambda r: hvd.start_allgather([np.ones((2, 2 + r))], "w")),
        ("op", lambda r: hvd.start_allreduce([np.ones(2)], [np.ones(2)], "w", op=hvd.Sum if r else hvd.Max)),
        ("prescale_factor", lambda r: hvd.start_allreduce([np.ones(2)], [np.ones(2)], "w", prescale_factor=1.0 + r)),
        ("postscale_factor", lambda r: hvd.start_reducescatter([np.ones(2)], "w", postscale_factor=1.0 + r)),
        ("root", lambda r: hvd.start_broadcast([np.ones(2)], min(r, 1), "w")),
        ("device", lambda r: hvd.start_allreduce([np.ones(2)], [np.ones(2)], "w", device="gpu" if r else "cpu")),
        ("verb", lambda r: hvd.start_barrier(name="w") if r else hvd.start_alltoall(np.ones(12), None, "w")),
        ("number of tensors", lambda r: hvd.start_allgather([np.ones(2)] * (1 + r), "w")),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_disagreements(comm: Any, what: str, call: Any, known: bool) -> None:
    if known and what != "verb":
        call(0).wait()  # by a bit, then
    with pytest.raises(MismatchError, match=rf"'w': rank \d: the ranks disagree: (.*; )?{what} is .* on rank 0 but"):
        call(hvd.rank()).wait()
    assert reduced(np.ones(2), "w2", op=hvd.Sum).tolist() == [comm.size] * 2


def test_invalid_requests_are_refused_at_once(comm: Any) -> None:
    x = np.ones((4, 2), np.float32)
    for match, call in [
        ("0-dimensional", lambda: hvd.start_allgather([np.ones(())])),
        ("not contiguous", lambda: hvd.start_allreduce([x.T], [x])),
        ("root_rank is 99", lambda: hvd.start_broadcast([x], 99)),
        ("mean of bool", lambda: hvd.start_allreduce([x > 0], [x > 0])),
        ("bool cannot be scaled", lambda: hvd.start_allreduce([x > 0], [x > 0], op=hvd.Sum, prescale_factor=2.0)),
        ("Adasum needs floats", lambda: hvd.start_allreduce([np.ones(2, int)], [np.ones(2, int)], op=hvd.Adasum)),
        ("expected Average or Sum", lambda: hvd.start_reducescatter([x], op=hvd.Max)),
        ("splits must be", lambda: hvd.start_alltoall(x, [1] * (comm.size + 1))),
        ("a sum of at most 4 rows", lambda: hvd.start_alltoall(x, [5] * comm.size)),
        ("op is 9", lambda: hvd.start_allreduce([x], [x], op=9)),
        ("not both", lambda: hvd.resolve_op(hvd.Sum, average=True)),
        ("no tensors", lambda: hvd.start_allgather([])),
        ("expected a string", lambda: hvd.start_allgather([x], 3)),  # type: ignore[arg-type]
        ("not registered", lambda: hvd.start_allgather([x], process_set=hvd.ProcessSet([0]))),
        ("float8|not supported", lambda: hvd.start_allgather([np.array(["a"])])),
    ]:
        with pytest.raises(UsageError, match=match):
            call()
    with pytest.raises(ValueError, match="of this name is in flight already"):
        first = hvd.start_allreduce([x], [x.copy()], "twice")
        hvd.start_allreduce([x], [x.copy()], "twice")
    first.wait()


@pytest.mark.ranks(min=2)
def test_join_covers_every_verb(comm: Any) -> None:
    """Rank r has r + 1 batches. A rank without any left contributes nothing, and gets nothing."""
    rank, size = comm.rank, comm.size
    for batch in range(rank + 1):
        reduced(np.ones(1))
        alive = range(batch, size)
        x = np.full((2, 3), rank + 1.0, np.float32)
        total = sum(r + 1 for r in alive)
        same(reduced(x, "sum", op=hvd.Sum), np.full_like(x, total))
        np.testing.assert_allclose(reduced(x, "average"), np.full_like(x, total / size), rtol=1e-6)
        same(reduced(x, f"min {batch}", op=hvd.Min), np.full_like(x, batch + 1))
        same(reduced(-x, "max", op=hvd.Max), np.full_like(x, -batch - 1))
        same(reduced(x, "product", op=hvd.Product), np.full_like(x, np.prod([r + 1.0 for r in alive])))
        two = hvd.start_allreduce([x, x.astype("f8")], [x.copy(), x.astype("f8")], "group", op=hvd.Sum).wait()
        assert (two[1] == total).all()
        (gathered,) = hvd.start_allgather([x], "gather").wait()
        assert gathered[:, 0].tolist() == [r + 1.0 for r in alive for _ in range(2)]
        target = x.copy()
        hvd.start_broadcast([target], size - 1, "broadcast").wait()
        assert (target == size).all()
        received, counts = hvd.start_alltoall(np.full((size, 1), rank), name="exchange").wait()
        assert received[:, 0].tolist() == list(alive) and counts.tolist() == [int(r in alive) for r in range(size)]
        (part,) = hvd.start_reducescatter([np.full((size, 1), rank + 1.0)], "scatter", op=hvd.Sum).wait()
        assert part.tolist() == [[total]]
        hvd.start_barrier(name="barrier").wait()
        assert hvd.allgather_object(rank, "objects") == list(alive)
        assert hvd.broadcast_object(rank, size - 1, "object") == size - 1
        if batch > 0:
            with pytest.raises(MismatchError, match="its root, rank 0, has joined"):
                hvd.start_broadcast([x], 0, "from rank 0").wait()
    join = hvd.start_join()
    with pytest.raises(UsageError, match="this rank has joined") if rank < size - 1 else _nothing():
        if rank < size - 1:
            hvd.start_allreduce([np.ones(1)], [np.ones(1)], "after")
    assert join.wait() == size - 1
    assert reduced(np.ones(1), op=hvd.Sum)[0] == size  # without a name; ranks had counted different numbers of these
    assert reduced(np.ones(1), "sum again", op=hvd.Sum)[0] == size


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_many_without_names() -> None:
    """More at once than there are names; they match in the order of the requests."""
    size = hvd.size()
    for shape in ((3,), (4,)):
        arrays = [np.full(shape, n, np.float32) for n in range(300)]
        works = [hvd.start_allreduce([array], [array], op=hvd.Sum) for array in arrays]
        for n, work in enumerate(works):
            assert (work.wait()[0] == size * n).all()


def test_different_operations_without_names(comm: Any) -> None:
    if comm.size == 1:
        return
    with pytest.raises(MismatchError, match="shape is"):
        reduced(np.ones(2 + comm.rank))
    assert reduced(np.ones(2), op=hvd.Sum)[0] == comm.size


def test_a_barrier_overtakes_earlier_operations(comm: Any) -> None:
    x = np.ones(2)
    early = hvd.start_allreduce([x], [np.empty(2)], "late comer", op=hvd.Sum) if comm.rank == 0 else None
    hvd.start_barrier().wait()
    if early is None:
        early = hvd.start_allreduce([x], [np.empty(2)], "late comer", op=hvd.Sum)
    else:
        assert comm.size == 1 or not early.done()
    assert early.wait()[0][0] == comm.size


@pytest.mark.ranks(min=3)
def test_process_sets(comm: Any) -> None:
    rank = comm.rank
    low, ends = hvd.ProcessSet([1, 0]), hvd.add_process_set([0, 2])
    assert low.included() is None and low.size() is None
    hvd.add_process_set(low)
    assert (ends.process_set_id, low.process_set_id, low.ranks, low.size()) == (1, 2, [0, 1], 2)
    for process_set in (low, ends):
        if process_set.included():
            assert process_set.rank() == process_set.ranks.index(rank)  # type: ignore[union-attr]
            total = reduced(np.full(2, rank + 1.0), "x", op=hvd.Sum, process_set=process_set)
            assert total[0] == sum(r + 1 for r in process_set.ranks or ())
            assert hvd.allgather_object(rank, process_set=process_set) == process_set.ranks
            value = np.full(2, rank)
            hvd.start_broadcast([value], process_set.ranks[-1], process_set=process_set).wait()
            assert value[0] == process_set.ranks[-1]
            with pytest.raises(UsageError, match="expected one of the ranks"):
                hvd.start_broadcast([value], 3 - sum(process_set.ranks or ()), process_set=process_set)
        else:
            with pytest.raises(UsageError, match=f"rank {rank} is not in"):
                reduced(np.ones(2), process_set=process_set)
            with pytest.raises(UsageError, match=f"rank {rank} is not in"):
                process_set.rank()
    if ends.included():
        with pytest.raises(MismatchError, match=r"shape is \(1,\) on rank 0 but \(3,\) on rank 2"):
            reduced(np.ones(rank + 1), "bad", process_set=ends)
    with pytest.raises(ValueError, match="already has these ranks"):
        hvd.add_process_set([2, 0])
    with pytest.raises(UsageError, match="expected ranks from 0 to"):
        hvd.add_process_set([comm.size])
    assert hvd.remove_process_set(ends) and ends.process_set_id is None
    assert not hvd.remove_process_set(ends) and not hvd.remove_process_set(hvd.global_process_set)
    new_ends = hvd.add_process_set(ends)
    assert new_ends is ends and ends.process_set_id == 1  # ids are reused
    works = []
    if ends.included():
        works = [hvd.start_allgather([np.ones(2)], f"{n}", process_set=ends) for n in range(50)]
    assert hvd.remove_process_set(ends) and hvd.remove_process_set(low)
    assert all(len(work.wait()[0]) == 4 for work in works)  # they were waited for
    with pytest.raises(MismatchError, match="add_process_set"):
        hvd.add_process_set([0, 1 + min(rank, 1)])


def test_adasum(comm: Any) -> None:
    orthogonal = np.zeros(comm.size, np.float32)
    orthogonal[comm.rank] = comm.rank + 1
    np.testing.assert_allclose(reduced(orthogonal, op=hvd.Adasum), np.arange(1, comm.size + 1), rtol=1e-6)
    parallel = np.full(5, 3.0, "float64")
    np.testing.assert_allclose(reduced(parallel, op=hvd.Adasum), parallel, rtol=1e-12)
    mine = np.random.default_rng(comm.rank).normal(size=7)
    results = hvd.allgather_object(reduced(mine, op=hvd.Adasum).tobytes())
    assert len(set(results)) == 1
    if comm.size == 2:
        a, b = (np.random.default_rng(r).normal(size=7) for r in range(2))
        expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
        np.testing.assert_allclose(reduced(mine, op=hvd.Adasum), expected, rtol=1e-12)


def test_ranks_and_build_queries(comm: Any) -> None:
    assert hvd.is_initialized() and hvd.init() is commlib.world()
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (comm.rank, comm.size, 0, 1)
    assert hvd.is_homogeneous() and hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported()
    assert not any([hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()])
    assert hvd.nccl_built() == 0 and not hvd.cuda_built()
    assert hvd.global_process_set.process_set_id == 0 and hvd.global_process_set.ranks == list(range(comm.size))
    assert "process_set_id=0" in str(hvd.global_process_set)
    hvd.init(list(range(comm.size)))
    if comm.size > 1:
        with pytest.raises(UsageError, match="already initialised with other ranks"):
            hvd.init([comm.rank])
    with pytest.raises(UsageError, match="dynamic"):
        hvd.init(process_sets="static")


def test_timeline(comm: Any, tmp_path: Any) -> None:
    path = tmp_path / "trace.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    if comm.rank == 0:
        with pytest.raises(UsageError, match="being written already"):
            hvd.start_timeline(str(path))
    for _ in range(2):
        reduced(np.ones(3), "traced")
    hvd.stop_timeline()
    reduced(np.ones(3), "not traced")
    if comm.rank != 0:
        assert not path.exists()
        return
    events = json.loads(path.read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    row = next(number for number, name in rows.items() if name == "traced")
    phases = [(event["ph"], event.get("name")) for event in events if event.get("tid") == row and event["ph"] != "M"]
    negotiated, reduced_alone = ("B", "NEGOTIATE_ALLREDUCE"), ("B", "MPI_ALLREDUCE")
    assert phases == [negotiated, ("E", None), ("B", "ALLREDUCE"), reduced_alone, ("E", None), ("E", None)] * 2
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert any(event.get("name") == "CYCLE_START" for event in events)
    assert "not traced" not in rows.values()


@pytest.mark.ranks(min=2)
def test_a_timeline_uses_horovods_names(comm: Any, tmp_path: Any) -> None:
    """Tools look for them: the activities of each tensor, in a row with its name, and the start of the file."""
    path, before = tmp_path / "trace.json", time()
    x = [np.full(4, float(number)) for number in range(3)]
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.start_allreduce(x, [np.empty(4) for _ in x], "fused", op=hvd.Sum).wait()
    rows = np.zeros(comm.size)
    hvd.start_allgather([rows], "allgather").wait()
    hvd.start_broadcast([rows], 0, "broadcast").wait()
    hvd.start_alltoall(rows, None, "alltoall").wait()
    hvd.start_reducescatter([rows], "reducescatter").wait()
    hvd.stop_timeline()
    if comm.rank != 0:
        return
    events = json.loads(path.read_text())
    assert abs(events[0]["args"]["start_time_since_epoch_in_micros"] / 1e6 - before) < 600
    tids = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    in_row = [event for event in events if event.get("tid") == tids["fused"] and event["ph"] in "BE"]
    assert "".join(event["ph"] for event in in_row) == "BEBBEBEBEE"
    names = [event["name"] for event in in_row if event["ph"] == "B"]
    packed = ["MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    assert names == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", *packed]
    for verb, what in (("allgather", "ALLGATHER"), ("broadcast", "BCAST"), ("alltoall", "ALLTOALL")):
        began = [event["name"] for event in events if event.get("tid") == tids[verb] and event["ph"] == "B"]
        assert began == [f"NEGOTIATE_{verb.upper()}", verb.upper(), f"MPI_{what}"]


def test_elastic_state(comm: Any) -> None:
    state = hvd.elastic.ObjectState(epoch=0, seen=[comm.rank])
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(1)])

    @hvd.elastic.run
    def train(state: Any) -> str:
        while state.epoch < 4:
            state.epoch += 1
            state.seen.append(state.epoch)
            if state.epoch == 3 and not resets:
                reduced(np.ones(2 + (comm.rank == 0)), "step")  # fails on all ranks, if there are several
                if comm.size == 1:
                    raise MismatchError("made up")
            state.commit()
        return "done"

    assert train(state) == "done"
    assert (state.epoch, state.seen, resets) == (4, [0, 1, 2, 3, 4], [1])


@pytest.mark.ranks(min=2)
def test_elastic_functions_after_ranks_have_diverged(comm: Any) -> None:
    """One rank had called one more function: each later one was refused, too, though all ranks called it."""
    state = hvd.elastic.ObjectState(made=1)
    inner = hvd.elastic.run(lambda state: "fine")
    raised: list[int] = []

    @hvd.elastic.run
    def outer(state: Any) -> str:
        if comm.rank == comm.size - 1 and not raised:
            raised.append(1)
            raise MismatchError("before the inner one")
        return str(inner(hvd.elastic.ObjectState(made=1)))

    with pytest.raises(UsageError, match="in different elastic functions"):
        outer(state)
    assert outer(state) == inner(state) == "fine"


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("others", ["by name", "many", "in a process set", "joined", "caught", "hosts"])
def test_an_elastic_run_recovers_when_one_rank_raises(comm: Any, others: str) -> None:
    """The others waited for it by name until COMMLIB_TIMEOUT, or for ever, while it waited in the order of calls."""
    last, expected = comm.size - 1, [float(sum(range(1, comm.size + 1)) + comm.size * step) for step in range(4)]
    pair = hvd.add_process_set([0, last]) if others == "in a process set" and last > 1 else hvd.global_process_set
    state = hvd.elastic.ObjectState(sums=[])
    calls: list[int] = []

    def wait() -> None:
        if others == "many":  # known and new, with and without a wait, more without a name than there are names at once
            names = ["elastic known", "new", *[None] * (100 if comm.rank else 3)]
            works = [hvd.start_allreduce([np.ones(2)], [np.ones(2)], each) for each in names]
            works[comm.rank % 2].wait()
        if comm.rank == last:
            raise hvd.HostsUpdatedInterrupt if others == "hosts" else MismatchError("made up")
        if others == "in a process set" and comm.rank == 0:
            reduced(np.ones(2), "elastic alone", process_set=pair)
        elif others == "joined" and comm.rank == 0:
            hvd.start_join(blocking=True).wait()
        elif others == "caught":
            for attempt in range(3):
                with pytest.raises(MismatchError, match=rf"rank {last} has gone back to the last commit"):
                    reduced(np.ones(2), f"elastic alone {attempt}")

    @hvd.elastic.run
    def train(state: Any) -> str:
        calls.append(len(state.sums))
        while len(state.sums) < 4:
            if len(calls) == 1 and len(state.sums) == 2:
                wait()
            mine = np.full(2, comm.rank + 1.0 + len(state.sums))
            total = reduced(mine, op=hvd.Sum)
            np.testing.assert_array_equal(total, reduced(mine, "elastic known", op=hvd.Sum))
            state.sums.append(float(total[0]))
            if len(state.sums) == 1:
                state.commit()
        return "done"

    assert train(state) == "done"
    assert state.sums == expected
    assert calls[0] == 0 and len(calls) == 2 and hvd.allgather_object(calls[1]) == [calls[1]] * comm.size
    hvd.remove_process_set(pair)
