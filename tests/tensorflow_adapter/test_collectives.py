"""Operations by name, eagerly and in traced functions: values in every dtype, and gradients."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from tests.tensorflow_adapter.oracle import MODES, assert_close, check, everyone, in_mode, stacked, values

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
INTEGERS = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64]
ALL = [*FLOATS, *INTEGERS, tf.complex64, tf.complex128, tf.bool]

both = pytest.mark.parametrize("mode", MODES)


def named(dtype: Any) -> str:
    return str(dtype.name)


@both
def test_all_reduce_in_every_dtype(comm: Any, mode: str) -> None:
    mine = [values(dtype, comm.rank) for dtype in ALL]
    results = in_mode(mode, lambda *xs: [hvd.allreduce(x, op=hvd.Sum) for x in xs])(*mine)
    for dtype, result in zip(ALL, results, strict=True):
        total = stacked(comm, dtype).sum(0)
        expected = total > 0 if dtype == tf.bool else total
        assert result.dtype == dtype
        check(result, expected)
    for dtype, tensor in zip(ALL, mine, strict=True):
        check(tensor, values(dtype, comm.rank))  # untouched


@both
@pytest.mark.parametrize("op", ["Average", "Min", "Max", "Product"])
def test_other_reductions(comm: Any, op: str, mode: str) -> None:
    def reduce(*xs: Any) -> Any:
        return hvd.grouped_allreduce(xs, op=getattr(hvd, op), name=op)

    results = in_mode(mode, reduce)(*(values(dtype, comm.rank) for dtype in FLOATS))
    for dtype, result in zip(FLOATS, results, strict=True):
        numbers = stacked(comm, dtype).astype(np.float64)
        expected = {
            "Average": numbers.mean(0),
            "Min": numbers.min(0),
            "Max": numbers.max(0),
            "Product": numbers.prod(0),
        }
        check(result, tf.cast(expected[op], dtype))


@both
def test_average_is_the_default_and_has_an_older_name(comm: Any, mode: str) -> None:
    x = values(tf.float32, comm.rank)
    numbers = stacked(comm, tf.float32)
    run = in_mode(mode, lambda x: [hvd.allreduce(x), hvd.allreduce(x, True), hvd.allreduce(x, average=False)])
    for result, expected in zip(run(x), [numbers.mean(0), numbers.mean(0), numbers.sum(0)], strict=True):
        check(result, tf.constant(expected, tf.float32))
    with pytest.raises(ValueError, match="op or average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


@both
def test_scales(comm: Any, mode: str) -> None:
    x = values(tf.float32, comm.rank)
    total = stacked(comm, tf.float32).sum(0)
    run = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0))
    check(run(x), tf.constant(2.0 * total, tf.float32))


@both
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression(comm: Any, compression: str, mode: str) -> None:
    x, whole = values(tf.float32, comm.rank), values(tf.int32, comm.rank)

    def reduce(*xs: Any) -> Any:
        compressor = getattr(hvd.Compression, compression)
        sent = compressor.compress(xs[0])[0].dtype
        assert sent == {"none": tf.float32, "fp16": tf.float16, "bf16": tf.bfloat16}[compression]
        alone = hvd.allreduce(xs[0], op=hvd.Sum, compression=compressor)
        return [alone, *hvd.grouped_allreduce(xs, op=hvd.Sum, compression=compressor)]

    for result, dtype in zip(in_mode(mode, reduce)(x, whole), [tf.float32, tf.float32, tf.int32], strict=True):
        check(result, tf.cast(stacked(comm, dtype).sum(0), dtype))


@both
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (70000,)], ids=str)
def test_every_shape(comm: Any, shape: tuple[int, ...], mode: str) -> None:
    x = values(tf.float32, comm.rank, shape)
    total = tf.constant(stacked(comm, tf.float32, shape).sum(0), tf.float32)

    def run(x: Any) -> Any:
        result = hvd.allreduce(x, op=hvd.Sum)
        assert result.shape == shape  # also while it is traced
        return result, hvd.broadcast(x, comm.size - 1)

    reduced, broadcast = in_mode(mode, run)(x)
    check(reduced, total)
    check(broadcast, values(tf.float32, comm.size - 1, shape))


def test_variables_arrays_and_numbers_are_tensors(comm: Any) -> None:
    check(hvd.allreduce(tf.Variable([1.0, 2.0])), tf.constant([1.0, 2.0]))
    check(hvd.allreduce(np.ones(3, np.float64)), tf.ones(3, tf.float64))
    check(hvd.allreduce(2.5), tf.constant(2.5))
    for wrong in ("text", tf.constant("text"), tf.SparseTensor([[0]], [1.0], [3])):
        with pytest.raises(UsageError, match=r"dtype string|SparseTensor"):
            hvd.allreduce(wrong)


@both
def test_movement_in_every_dtype(comm: Any, mode: str) -> None:
    rows = comm.rank + 1
    splits = [rank + 1 for rank in range(comm.size)]
    shape = (sum(splits), 2)
    last = comm.size - 1

    def move(*xs: Any) -> Any:
        return [
            hvd.grouped_allgather([x[:rows] for x in xs], name="rows"),
            [hvd.broadcast(x, last) for x in xs],
            [hvd.alltoall(x, splits) for x in xs],
            [hvd.alltoall(x[: comm.size]) for x in xs],
        ]

    gathered, broadcast, exchanged, shared = in_mode(mode, move)(*(values(dtype, comm.rank, shape) for dtype in ALL))
    first = sum(splits[: comm.rank])
    for index, dtype in enumerate(ALL):
        parts = everyone(comm, dtype, shape)
        check(gathered[index], tf.concat([part[: rank + 1] for rank, part in enumerate(parts)], 0))
        check(broadcast[index], parts[last])
        output, received = exchanged[index]
        check(output, tf.concat([part[first : first + rows] for part in parts], 0))
        check(received, tf.constant([rows] * comm.size, tf.int32))
        check(shared[index], tf.concat([part[comm.rank : comm.rank + 1] for part in parts], 0))


@both
def test_all_gather_of_nothing_on_some_ranks(comm: Any, mode: str) -> None:
    x = values(tf.float32, comm.rank)[: comm.rank]
    parts = [part[:rank] for rank, part in enumerate(everyone(comm, tf.float32))]
    check(in_mode(mode, lambda x: hvd.allgather(x))(x), tf.concat(parts, 0))


@both
def test_reduce_scatter(comm: Any, mode: str) -> None:
    rows = 2 * comm.size + 1  # uneven beyond one rank

    def scatter(*xs: Any) -> Any:
        return [
            hvd.reducescatter(xs[0], op=hvd.Sum, postscale_factor=2.0),
            *hvd.grouped_reducescatter(xs, compression=hvd.Compression.bf16),
        ]

    mine = [values(dtype, comm.rank, (rows, 2)) for dtype in (tf.float32, tf.float64)]
    total = stacked(comm, tf.float32, (rows, 2)).sum(0)
    part = np.array_split(total, comm.size)[comm.rank]
    results = in_mode(mode, scatter)(*mine)
    check(results[0], tf.constant(2.0 * part, tf.float32))
    for result, dtype in zip(results[1:], (tf.float32, tf.float64), strict=True):
        check(result, tf.cast(tf.cast(part / comm.size, tf.bfloat16), dtype))


@both
def test_barrier_and_properties(comm: Any, mode: str) -> None:
    def ask() -> Any:
        hvd.barrier()
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()]

    answers = [int(answer) for answer in in_mode(mode, ask)()]
    assert answers == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]
    assert int(hvd.size_op(77)) == 0 and int(hvd.process_set_included_op(77)) == -2


# Gradients


def gradients(mode: str, function: Any, *xs: Any) -> Any:
    """Return the gradients of a weighted sum of the results of `function`; weights differ among elements."""

    def run(*xs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(xs)
            results = function(*xs)
            loss = tf.add_n([tf.reduce_sum(result * weigh(tf.shape(result), result.dtype)) for result in results])
        return tape.gradient(loss, xs)

    return in_mode(mode, run)(*xs)


def weigh(shape: Any, dtype: Any) -> Any:
    return tf.cast(tf.reshape(tf.range(tf.reduce_prod(shape)) % 7 + 1 + hvd.rank(), shape), dtype)


def all_weights(comm: Any, shape: tuple[int, ...]) -> Any:
    flat = np.arange(int(np.prod(shape))).reshape(shape) % 7 + 1.0
    return np.stack([flat + rank for rank in range(comm.size)])


@both
def test_gradient_of_all_reduce(comm: Any, mode: str) -> None:
    xs = [values(tf.float64, comm.rank), values(tf.float64, comm.rank, (3,))]

    def reduce(*xs: Any) -> Any:
        alone = hvd.allreduce(xs[0], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        return [alone, *hvd.grouped_allreduce(xs)]

    first, second = gradients(mode, reduce, *xs)
    assert_close(first, all_weights(comm, (6, 2)).sum(0) + all_weights(comm, (6, 2)).mean(0))
    assert_close(second, all_weights(comm, (3,)).mean(0))


@both
def test_gradient_of_a_group_with_integers(comm: Any, mode: str) -> None:
    def reduce(x: Any) -> Any:
        return hvd.grouped_allreduce([tf.constant([comm.rank]), x])[1:]

    assert_close(gradients(mode, reduce, values(tf.float64, 0))[0], all_weights(comm, (6, 2)).mean(0))


@both
def test_gradient_of_all_gather(comm: Any, mode: str) -> None:
    xs = [values(tf.float64, comm.rank, (comm.rank + 1, 2)), values(tf.float64, comm.rank, (2,))]
    total = sum(range(comm.size + 1))
    first = sum(range(comm.rank + 1))
    results = gradients(mode, lambda *xs: [hvd.allgather(xs[0]), *hvd.grouped_allgather(xs)], *xs)
    mean = all_weights(comm, (total, 2)).mean(0)[first : first + comm.rank + 1]
    assert_close(results[0], 2 * mean)
    assert_close(results[1], all_weights(comm, (2 * comm.size,)).mean(0)[2 * comm.rank : 2 * comm.rank + 2])


@both
def test_gradient_of_broadcast(comm: Any, mode: str) -> None:
    root = comm.size - 1
    (result,) = gradients(mode, lambda x: [hvd.broadcast(x, root)], values(tf.float64, comm.rank))
    expected = all_weights(comm, (6, 2)).mean(0)
    assert_close(result, expected if comm.rank == root else np.zeros((6, 2)))


@both
@pytest.mark.parametrize("unsent", [0, 2])
def test_gradient_of_all_to_all(comm: Any, mode: str, unsent: int) -> None:
    splits = [rank + 1 for rank in range(comm.size)]
    (result,) = gradients(mode, lambda x: [hvd.alltoall(x, splits)[0]], values(tf.float64, 0, (sum(splits) + unsent,)))
    # Rank r received r + 1 elements from each rank in order, and weighted them.
    expected = [
        all_weights(comm, (comm.size * (rank + 1),))[rank][comm.rank * (rank + 1) : (comm.rank + 1) * (rank + 1)]
        for rank in range(comm.size)
    ]
    assert_close(result, np.concatenate([*expected, np.zeros(unsent)]))


@both
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_gradient_of_reduce_scatter(comm: Any, op: str, mode: str) -> None:
    rows = 2 * comm.size + 1

    def scatter(*xs: Any) -> Any:
        return hvd.grouped_reducescatter(xs, op=getattr(hvd, op), prescale_factor=2.0, postscale_factor=3.0)

    parts = [len(part) for part in np.array_split(np.arange(rows), comm.size)]
    gathered = np.concatenate([all_weights(comm, (count,))[rank] for rank, count in enumerate(parts)])
    expected = gathered * 6.0 * (comm.size if op == "Sum" else 1)
    assert_close(gradients(mode, scatter, values(tf.float64, comm.rank, (rows,)))[0], expected)


@both
def test_maximum_has_no_gradient(comm: Any, mode: str) -> None:
    # In a traced function TensorFlow replaces our error by its own, with the same text.
    with pytest.raises(Exception, match="op=Max has no gradient"):
        gradients(mode, lambda x: [hvd.allreduce(x, op=hvd.Max)], values(tf.float64, comm.rank))


def test_gradient_of_a_gradient(comm: Any) -> None:
    x = tf.constant([1.0, 2.0], tf.float64) * (comm.rank + 1)
    total = tf.constant([1.0, 2.0], tf.float64) * sum(range(comm.size + 1))
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
        first = inner.gradient(loss, x)
    assert_close(first, comm.size * 3 * total**2)
    # d first / d sum is 6 sum times the size; backward adds over ranks once more.
    assert_close(outer.gradient(first, x), comm.size**2 * 6 * total)


def test_an_eager_tensor_in_a_traced_function(comm: Any) -> None:
    """Regression: its number was part of the name, and ranks that had made more tensors waited for each other."""
    for _ in range(comm.rank):
        tf.constant(1.0)
    x = tf.constant([1.0, 2.0])
    check(tf.function(lambda: hvd.allreduce(x, op=hvd.Sum))(), x * comm.size)


@both
@pytest.mark.ranks(min=2)
def test_gradient_of_a_gradient_of_broadcast(comm: Any, mode: str) -> None:
    """Regression: only the root computed it, and waited for the other ranks."""
    x = tf.constant([1.0, 2.0], tf.float64)

    def run() -> tuple[Any, Any]:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(hvd.broadcast(x, 0) ** 3)
            first = inner.gradient(loss, x)
        return first, outer.gradient(first, x)

    first, second = in_mode(mode, run)()
    assert_close(first, 3 * x**2 * (comm.rank == 0))
    assert_close(second, 6 * x * (comm.rank == 0) / comm.size)


@pytest.mark.parametrize("verb", ["allreduce", "alltoall", "reducescatter"])
def test_forward_mode(comm: Any, verb: str) -> None:
    x = values(tf.float64, comm.rank, (2 * comm.size,))
    with tf.autodiff.ForwardAccumulator(x, 2 * x) as accumulator:
        result = getattr(hvd, verb)(x)
    assert_close(accumulator.jvp(result), 2 * result)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("verb", "ordered"), [("allgather", "all_gather or all_gather_v"), ("broadcast", "ranks=")])
def test_forward_mode_is_refused_where_gradients_are_averaged(comm: Any, verb: str, ordered: str) -> None:
    """Regression: the derivative was divided by the number of ranks."""
    x, more = tf.ones(2), [0] * (verb == "broadcast")
    with tf.autodiff.ForwardAccumulator(x, x):
        with pytest.raises(UsageError, match=rf"^{verb}: .*ForwardAccumulator .*ordered verb \(.*{ordered}\)"):
            getattr(hvd, verb)(x, *more)
        getattr(hvd, verb)(tf.stop_gradient(x), *more)


def test_gradients_through_nested_functions_and_a_loop(comm: Any) -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(2):
                y = inner(y)
            loss = tf.reduce_sum(y)
        return loss, tape.gradient(loss, x)

    loss, gradient = outer(tf.ones(3, tf.float64))
    assert_close(loss, tf.constant(3.0 * comm.size**2, tf.float64))
    assert_close(gradient, np.full(3, comm.size**2.0))


# Sparse


@both
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_slices_are_gathered(comm: Any, op: str, mode: str) -> None:
    def reduce(rows: Any) -> Any:
        slices = tf.IndexedSlices(tf.ones([rows, 2]) * (comm.rank + 1.0), tf.range(rows), tf.constant([5, 2]))
        result = hvd.allreduce(slices, op=getattr(hvd, op))
        assert isinstance(result, tf.IndexedSlices)
        return tf.convert_to_tensor(result), tf.shape(result.values)

    dense, shape = in_mode(mode, reduce)(tf.constant(comm.rank + 1))
    expected = np.zeros((5, 2))
    for rank in range(comm.size):
        expected[: rank + 1] += rank + 1
    assert list(shape) == [sum(range(comm.size + 1)), 2]
    assert_close(dense, tf.constant(expected / (comm.size if op == "Average" else 1), tf.float32), 1e-6)


def test_slices_support_no_other_reductions(comm: Any) -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0], [5, 2])
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(NotImplementedError, match="scale"):
        hvd.allreduce(slices, prescale_factor=2.0)


@both
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_slices_in_a_group(comm: Any, op: str, mode: str) -> None:
    """Regression: groups refused them, although `allreduce` and Horovod's groups accept them."""

    def reduce(rows: Any) -> Any:
        one = tf.IndexedSlices(tf.ones([rows, 2]) * (comm.rank + 1.0), tf.range(rows), tf.constant([5, 2]))
        other = tf.IndexedSlices(tf.ones([1], tf.float64), tf.constant([comm.rank], tf.int64), tf.constant([8]))
        given = [one, tf.ones(3) * comm.rank, other, 2]
        results = hvd.grouped_allreduce(given, op=getattr(hvd, op), compression=hvd.Compression.fp16)
        assert [isinstance(result, tf.IndexedSlices) for result in results] == [True, False, True, False]
        return [tf.convert_to_tensor(result) for result in results]

    results = in_mode(mode, reduce)(tf.constant(comm.rank + 1))
    divisor = comm.size if op == "Average" else 1
    one = np.zeros((5, 2), np.float32)
    for rank in range(comm.size):
        one[: rank + 1] += rank + 1
    other = np.where(np.arange(8) < comm.size, 1.0 / divisor, 0.0)
    assert_close(results[0], tf.constant(one / divisor), 1e-6)
    check(results[1], tf.ones(3) * (sum(range(comm.size)) / divisor))
    check(results[2], tf.constant(other, tf.float64))
    check(results[3], tf.constant(2 * comm.size // divisor))


def test_slices_alone_in_a_group_and_refusals(comm: Any) -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0], [5, 2])
    (result,) = hvd.grouped_allreduce([slices], op=hvd.Sum)
    check(tf.convert_to_tensor(result)[0], tf.ones(2) * comm.size)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.grouped_allreduce([tf.ones(2), slices], op=hvd.Max)
    with pytest.raises(NotImplementedError, match="scale"):
        hvd.grouped_allreduce([slices], postscale_factor=2.0)
    with pytest.raises(UsageError, match="entry 1"):
        hvd.grouped_allreduce([slices, None])


def test_a_gradient_through_slices_in_a_group(comm: Any) -> None:
    values = tf.Variable(tf.ones([1, 2]))
    with tf.GradientTape() as tape:
        slices = tf.IndexedSlices(values * 3.0, [comm.rank], [comm.size, 2])
        (result,) = hvd.grouped_allreduce([slices], op=hvd.Sum)
        loss = tf.reduce_sum(tf.convert_to_tensor(result)) * (comm.rank + 1.0)
    check(tape.gradient(loss, values), tf.ones([1, 2]) * 3.0 * (comm.size + 1) / 2)
