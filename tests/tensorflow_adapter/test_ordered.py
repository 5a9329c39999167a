"""The ordered verbs on tensors: every dtype, eagerly and in traced functions, blocking and as Work."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.errors import MismatchError, StallError, UsageError
from tests.tensorflow_adapter.oracle import MODES, check, everyone, in_mode, stacked, values

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
INTEGERS = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64]
ALL = [*FLOATS, *INTEGERS, tf.complex64, tf.complex128, tf.bool]
SOME = [tf.float32, tf.bfloat16, tf.int64]

both = pytest.mark.parametrize("mode", MODES)


def kind(dtype: Any) -> str:
    return str(dtype.name)


@both
def test_all_reduce_in_every_dtype(comm: Any, mode: str) -> None:
    mine = [values(dtype, comm.rank) for dtype in ALL]
    results = in_mode(mode, lambda *xs: [ct.all_reduce(x) for x in xs])(*mine)
    for dtype, result in zip(ALL, results, strict=True):
        total = stacked(comm, dtype).sum(0)
        assert result.dtype == dtype
        check(result, total > 0 if dtype == tf.bool else total)
    for dtype, tensor in zip(ALL, mine, strict=True):
        check(tensor, values(dtype, comm.rank))  # untouched


@both
@pytest.mark.parametrize("op", ["mean", "min", "max", "prod"])
def test_other_operations(comm: Any, op: Any, mode: str) -> None:
    results = in_mode(mode, lambda *xs: [ct.all_reduce(x, op, algorithm="auto") for x in xs])(
        *(values(dtype, comm.rank) for dtype in FLOATS)
    )
    for dtype, result in zip(FLOATS, results, strict=True):
        check(result, tf.cast(getattr(stacked(comm, dtype).astype(np.float64), op)(0), dtype))


@both
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (70000,)], ids=str)
def test_every_shape(comm: Any, shape: tuple[int, ...], mode: str) -> None:
    def run(x: Any) -> Any:
        reduced = ct.all_reduce(x)
        assert reduced.shape == shape  # also while it is traced
        return reduced, ct.broadcast(x, root=comm.size - 1, ranks=comm)

    reduced, broadcast = in_mode(mode, run)(values(tf.float32, comm.rank, shape))
    check(reduced, tf.constant(stacked(comm, tf.float32, shape).sum(0), tf.float32))
    check(broadcast, values(tf.float32, comm.size - 1, shape))


@both
@pytest.mark.parametrize("dtype", ALL, ids=kind)
def test_movement(comm: Any, dtype: Any, mode: str) -> None:
    last, parts = comm.size - 1, everyone(comm, dtype)
    whole = tf.concat(parts, 0)

    def move(x: Any) -> Any:
        result = {
            "all_gather": ct.all_gather(x),
            "all_gather_v": ct.all_gather_v(x[: comm.rank + 1]),
            "broadcast": ct.broadcast(x, last, ranks=comm),
            "scatter": ct.scatter(whole if comm.rank == last else x, last),
        }
        gathered = ct.gather(x, last)
        assert (gathered is None) == (comm.rank != last)
        return result if gathered is None else {**result, "gather": gathered}

    result = in_mode(mode, move)(parts[comm.rank])
    check(result["all_gather"], whole)
    check(result["all_gather_v"], tf.concat([part[: rank + 1] for rank, part in enumerate(parts)], 0))
    check(result["broadcast"], parts[last])
    check(result["scatter"], parts[comm.rank])
    if comm.rank == last:
        check(result["gather"], whole)


@both
@pytest.mark.parametrize("dtype", SOME, ids=kind)
def test_scans_and_uneven_shards(comm: Any, dtype: Any, mode: str) -> None:
    counts = [6, *[0] * (comm.size - 1)] if comm.size < 3 else [1, 3, 2, *[0] * (comm.size - 3)]
    parts = stacked(comm, dtype)

    def run(x: Any) -> Any:
        results = [
            ct.scan(x),
            ct.reduce_scatter_v(x, counts),
            ct.reduce_scatter_v(x, tf.constant(counts), "max"),
        ]
        before = ct.exscan(x)
        assert (before is None) == (comm.rank == 0)
        return results if before is None else [*results, before]

    results = in_mode(mode, run)(values(dtype, comm.rank))
    start = sum(counts[: comm.rank])
    rows = slice(start, start + counts[comm.rank])
    expected = [parts[: comm.rank + 1].sum(0), parts.sum(0)[rows], parts.max(0)[rows], parts[: comm.rank].sum(0)]
    for got, right in zip(results, expected, strict=comm.rank > 0):
        assert got.dtype == dtype
        check(got, tf.cast(right, dtype))
    if mode == "eager":
        check(ct.scan_async(values(dtype, comm.rank)).wait(), tf.cast(expected[0], dtype))
        check(ct.reduce_scatter_v_async(values(dtype, comm.rank), counts).wait(), tf.cast(expected[1], dtype))
        assert (ct.exscan_async(values(dtype, comm.rank)).wait() is None) == (comm.rank == 0)


@both
def test_algorithms(comm: Any, mode: str) -> None:
    """Every verb with a choice of algorithm passes it on, and refuses an unknown one."""
    root, x = comm.size - 1, tf.ones([2 * comm.size, 2])
    counts = [2 * comm.size, *[0] * (comm.size - 1)]
    for algorithm, call in (
        ("direct", lambda x, how: ct.all_reduce(x, algorithm=how)),
        ("direct", lambda x, how: ct.reduce_scatter(x, algorithm=how)),
        ("direct", lambda x, how: ct.reduce_scatter_v(x, counts, algorithm=how)),
        ("pairwise", lambda x, how: ct.all_to_all(x, algorithm=how)),
        ("ring", lambda x, how: ct.all_gather(x, algorithm=how)),
        ("binomial_tree", lambda x, how: ct.reduce(x, root=root, algorithm=how)),
        ("binomial_tree", lambda x, how: ct.gather(x, root, algorithm=how)),
        ("binomial_tree", lambda x, how: ct.scatter(x, root, algorithm=how)),
        ("binomial_tree", lambda x, how: ct.broadcast(x, root=root, algorithm=how, ranks=comm)),
    ):
        named, auto = (in_mode(mode, lambda x, call=call, how=how: call(x, how))(x) for how in (algorithm, "auto"))
        assert (named is None) == (auto is None)
        if named is not None:
            check(named, auto)
        with pytest.raises(UsageError, match="no such algorithm"):
            in_mode(mode, lambda x, call=call: call(x, "no such algorithm"))(x)
    with pytest.raises(UsageError, match="algorithm= selects an algorithm of the ordered verb: give ranks= too"):
        ct.broadcast(x, root=0, algorithm="binomial_tree")


@both
@pytest.mark.parametrize("dtype", SOME, ids=kind)
def test_reductions_to_some(comm: Any, dtype: Any, mode: str) -> None:
    last, total = comm.size - 1, tf.cast(stacked(comm, dtype).sum(0), dtype)

    def reduce(x: Any) -> Any:
        reduced = ct.reduce(x, "sum", last)
        assert (reduced is None) == (comm.rank != last)
        return ct.reduce_scatter(x), x if reduced is None else reduced

    part, reduced = in_mode(mode, reduce)(values(dtype, comm.rank))
    check(part, tf.constant(np.array_split(total, comm.size)[comm.rank], dtype))
    check(reduced, total if comm.rank == last else values(dtype, comm.rank))


@both
@pytest.mark.parametrize("dtype", SOME, ids=kind)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_exchanges(comm: Any, dtype: Any, as_tensor: bool, mode: str) -> None:
    splits = [(comm.rank + peer) % 3 for peer in range(comm.size)]
    counts = [(peer + comm.rank) % 3 for peer in range(comm.size)]
    numbers = [10 * comm.rank + peer for peer, n in enumerate(splits) for _ in range(n)]
    expected = [10 * peer + comm.rank for peer, n in enumerate(counts) for _ in range(n)]

    def exchange(x: Any, rows: Any, given: Any) -> Any:
        known = ct.all_to_all_v(x, splits, takes=given if as_tensor else counts)
        return *ct.all_to_all_v(x, given if as_tensor else splits), ct.all_to_all(rows), *known

    rows = values(dtype, comm.rank, (comm.size, 2))
    out, received, shared, *known = in_mode(mode, exchange)(
        tf.cast(tf.constant(numbers), dtype), rows, tf.constant(splits)
    )
    for arrived, lengths in ((out, received), known):
        check(arrived, tf.cast(tf.constant(expected), dtype))
        check(lengths, tf.constant(counts, tf.int64))
    check(shared, tf.stack([part[comm.rank] for part in everyone(comm, dtype, (comm.size, 2))]))


@both
@pytest.mark.parametrize("dtype", SOME, ids=kind)
def test_messages(comm: Any, dtype: Any, mode: str) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def talk(x: Any) -> Any:
        around = ct.send_recv(x, right, tf.zeros_like(x), left)
        assert around.shape == x.shape
        if comm.size == 1:
            return around, around
        if comm.rank == 0:
            ct.send(x, 1, 3)
            return around, ct.recv(x, 1)
        if comm.rank == 1:
            first = ct.recv(tf.zeros([6, 2], dtype), 0, 3)
            ct.send(x, 0)
            return around, first
        return around, x

    around, text = in_mode(mode, talk)(values(dtype, comm.rank))
    check(around, values(dtype, left))
    check(text, values(dtype, 1 - comm.rank if comm.rank < 2 <= comm.size else comm.rank))


@both
def test_a_group_and_a_barrier(comm: Any, mode: str) -> None:
    group = comm.split(comm.rank % 2, comm.rank)
    ranks = range(comm.rank % 2, comm.size, 2)

    def run(x: Any) -> Any:
        ct.barrier(ranks=group)
        return ct.all_reduce(x, ranks=group), ct.broadcast(x, root=group.size - 1, ranks=group)

    total, last = in_mode(mode, run)(tf.constant([comm.rank]))
    check(total, tf.constant([sum(ranks)]))
    check(last, tf.constant([ranks[-1]]))


@both
def test_verbs_run_in_call_order(comm: Any, mode: str) -> None:
    """A traced function may not swap verbs, even if neither needs the other's result."""

    def run(x: Any) -> Any:
        for number in range(20):
            ct.all_gather(x + number) if number % 2 else ct.all_reduce(x, "max")
        return ct.all_reduce(x)

    check(in_mode(mode, run)(tf.ones(3)), tf.fill([3], float(comm.size)))


def test_verbs_in_a_loop_of_a_graph(comm: Any) -> None:
    @tf.function
    def run(x: Any, times: Any) -> Any:
        for _ in tf.range(times):
            x = ct.all_reduce(x, "mean") + 1.0
        return x

    check(run(tf.fill([2], float(comm.rank)), tf.constant(3)), tf.fill([2], (comm.size - 1) / 2 + 3.0))


@pytest.mark.parametrize("dtype", SOME, ids=kind)
def test_async(comm: Any, dtype: Any) -> None:
    last, parts = comm.size - 1, everyone(comm, dtype)
    mine, whole, total = parts[comm.rank], tf.concat(parts, 0), tf.cast(stacked(comm, dtype).sum(0), dtype)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    rows = values(dtype, comm.rank, (comm.size, 2))
    exchanged = tf.stack([part[comm.rank] for part in everyone(comm, dtype, (comm.size, 2))])
    works = [
        (ct.all_reduce_async(mine), total),
        (ct.reduce_scatter_async(mine), tf.constant(np.array_split(total, comm.size)[comm.rank], dtype)),
        (ct.broadcast_async(mine, last), parts[last]),
        (ct.all_gather_async(mine), whole),
        (ct.all_gather_v_async(mine), whole),
        (ct.scatter_async(whole if comm.rank == last else None, last), mine),
        (ct.all_to_all_async(rows), exchanged),
        (ct.all_to_all_v_async(rows, [1] * comm.size).then(lambda answer: answer[0]), exchanged),
        (ct.recv_async(mine, left, 9), parts[left]),
        (ct.send_recv_async(mine, right, mine, left), parts[left]),
    ]
    sent = ct.send_async(mine, right, 9)
    for work, expected in works:
        check(work.wait(), expected)
        assert work.done() and work.exception() is None
    assert sent.wait(30) is None and isinstance(sent, ct.Work)
    for work, expected in ((ct.reduce_async(mine, root=last), total), (ct.gather_async(mine, last), whole)):
        if comm.rank == last:
            check(work.result(), expected)
        else:
            assert work.result() is None
    ct.barrier_async().wait()
    assert ct.broadcast_object_async(comm.rank, last).wait() == last
    assert ct.all_gather_object_async(comm.rank).wait() == list(range(comm.size))


def test_objects(comm: Any) -> None:
    assert ct.all_gather_object(str(comm.rank)) == [str(rank) for rank in range(comm.size)]
    assert ct.broadcast_object({"rank": comm.rank}, root=comm.size - 1, ranks=comm) == {"rank": comm.size - 1}


def test_variables_arrays_and_numbers_are_tensors(comm: Any) -> None:
    check(ct.all_reduce(tf.Variable([1.0, 2.0]), "max"), tf.constant([1.0, 2.0]))
    check(ct.all_gather(np.ones(3)), tf.ones(3 * comm.size, tf.float64))
    check(ct.all_reduce(2.5, "mean"), tf.constant(2.5))
    check(ct.all_gather(2.5), tf.fill([comm.size], 2.5))
    for wrong in ("text", tf.SparseTensor([[0]], [1.0], [3])):
        with pytest.raises(UsageError, match=r"dtype string|SparseTensor"):
            ct.all_reduce(wrong)


def test_results_do_not_share_memory(comm: Any) -> None:
    """TensorFlow adopts a result's memory: a later call must not write to it."""
    results = [ct.all_reduce(tf.fill([5000], float(number)), "max") for number in range(3)]
    variable = tf.Variable(results[0])
    variable.assign_add(tf.ones(5000))
    for number, result in enumerate(results):
        check(result, tf.fill([5000], float(number)))


def test_names_shared_with_operations_by_name(comm: Any) -> None:
    check(ct.broadcast(tf.constant([comm.rank]), root=comm.size - 1), tf.constant([comm.size - 1]))
    for verb in (ct.broadcast, ct.broadcast_object):
        with pytest.raises(UsageError, match="two names of one argument"):
            verb(tf.ones(2), 0, root=0)
        with pytest.raises(UsageError, match="neither name nor process_set"):
            verb(tf.ones(2), 0, name="x", ranks=comm)
    with pytest.raises(UsageError, match="neither name nor process_set"):
        ct.barrier(ct.global_process_set, ranks=comm)


# Refusals


@both
def test_bad_arguments(comm: Any, mode: str) -> None:
    for call, text in (
        (lambda x: ct.all_reduce(x, "avg"), "unknown operation"),  # type: ignore[arg-type]
        (lambda x: ct.all_to_all_v(x, [1] * comm.size), "splits"),
        (lambda x: ct.broadcast(x, root=comm.size, ranks=comm), "root"),
        (lambda x: ct.send(x, comm.size), "peer"),
        (lambda x: ct.all_gather(tf.ragged.constant([[1], [2, 3]])), r"a RaggedTensor: .* x.to_tensor\(\)"),
        (lambda x: ct.all_reduce(tf.sparse.from_dense([[1.0, 0.0]])), r"a SparseTensor: .* tf.sparse.to_dense\(x\)"),
        (lambda x: ct.all_reduce(tf.IndexedSlices(x, x)), r"an IndexedSlices: .* tf.convert_to_tensor\(x\)"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text) as caught:
            in_mode(mode, call)(tf.ones(2 + comm.size))
        assert isinstance(caught.value, UsageError)
    check(ct.all_reduce(tf.ones(2)), tf.fill([2], float(comm.size)))


@both
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["shape", "dtype", "op", "verb"])
def test_mismatches(comm: Any, what: str, mode: str) -> None:
    odd = comm.rank == comm.size - 1
    group = comm.split(0)

    def call(x: Any) -> Any:
        if what == "shape":
            return ct.all_reduce(tf.ones([3 if odd else 2]), ranks=group)
        if what == "dtype":
            return ct.all_reduce(tf.ones(2, tf.bfloat16 if odd else tf.float32), ranks=group)
        if what == "op":
            return ct.all_reduce(tf.ones(2), "sum" if odd else "max", ranks=group)
        return ct.all_gather(tf.ones(2), ranks=group) if odd else ct.all_reduce(tf.ones(2), ranks=group)

    with pytest.raises(MismatchError, match="all_reduce") as caught:
        in_mode(mode, call)(tf.ones(2))
    assert isinstance(caught.value, tf.errors.FailedPreconditionError)
    check(in_mode(mode, ct.all_reduce)(tf.ones(2)), tf.fill([2], float(comm.size)))


@pytest.mark.ranks(min=2)
def test_errors_of_work_belong_to_tensorflow_too(comm: Any) -> None:
    group = comm.split(0)
    work = ct.all_reduce_async(tf.ones(2 + (comm.rank == 0)), ranks=group)
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        work.wait()
    assert isinstance(caught.value, MismatchError)
    error = work.exception()
    assert isinstance(error, MismatchError) and isinstance(error, tf.errors.FailedPreconditionError)
    if comm.rank == 0:
        late = ct.recv_async(tf.ones(2), 1)
        with pytest.raises(tf.errors.DeadlineExceededError) as waited:
            late.wait(0.01)
        assert isinstance(waited.value, StallError)
    comm.barrier()
    if comm.rank == 0:
        check(late.wait(), tf.fill([2], 5.0))
    if comm.rank == 1:
        ct.send(tf.fill([2], 5.0), 0)


def test_unsupported_verbs_in_traced_functions_are_refused(comm: Any) -> None:
    for call, text in (
        (lambda: ct.all_reduce_async(tf.ones(2)), "call all_reduce instead"),
        (lambda: ct.barrier_async(), "call barrier instead"),
        (lambda: ct.all_gather_object(1), "tensors only"),
        (lambda: ct.broadcast_object(1, ranks=comm), "tensors only"),
        (lambda: ct.scatter(None), "every rank passes a tensor"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            tf.function(call)()
    with pytest.raises(Exception, match="jit_compile=False"):
        tf.function(ct.all_reduce, jit_compile=True)(tf.ones(2))


def test_a_graph_of_tensorflow_1_is_refused(comm: Any) -> None:
    with tf.Graph().as_default(), pytest.raises(UsageError, match="nothing orders"):
        ct.all_reduce(tf.ones(2))


def test_a_scattered_tensor_of_another_dtype(comm: Any) -> None:
    dtype = tf.float32 if comm.rank == 0 else tf.int32
    run = tf.function(lambda: ct.scatter(tf.ones([comm.size], dtype)))
    if comm.rank == 0:
        check(run(), tf.ones(1))
    else:
        with pytest.raises(UsageError, match="received float32, this rank passed int32"):
            run()
