"""Bodies of tests: gradients, operations by name and traced verbs on TensorFlow's tensors of a device."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import commlib_tensorflow as ct
import commlib_tensorflow.keras as ct_keras
from tests.tensorflow_adapter import keras_oracle as keras_of
from tests.tensorflow_adapter import oracle

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
CLOSE = 1e-9  # a GPU sums in another order than the host


def where_is(tensor: Any) -> str:
    """Return the type of the device that has a tensor."""
    return str(tf.DeviceSpec.from_string(tensor.backing_device).device_type)


def tape(comm: Any, mode: str, **options: Any) -> None:
    """Training over all ranks matches one process on the whole batch."""
    variables, alone = oracle.weights(), oracle.weights()

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = oracle.loss_of(variables, (x, y))
        gradients = ct.DistributedGradientTape(tape, **options).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    run = oracle.in_mode(mode, step)
    for number in range(4):
        run(*oracle.mine(comm, oracle.batch(comm, number)))
        with tf.GradientTape() as plain:
            loss = oracle.loss_of(alone, oracle.batch(comm, number))
        for variable, gradient in zip(alone, plain.gradient(loss, alone), strict=True):
            variable.assign_sub(0.1 * gradient)
    oracle.assert_close(variables, alone, CLOSE)
    oracle.assert_same_everywhere(comm, variables)


def dtypes(comm: Any, place: Any, mode: str, dtype: str) -> None:
    """Gradients of small whole numbers are exact, and have the dtype and device of their variable."""
    kind = tf.as_dtype(dtype)
    variable = tf.Variable(place.put(np.ones(5, kind.as_numpy_dtype)))
    factors = tf.cast(tf.range(5), kind)
    total = sum(range(comm.size + 1))

    def run(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.math.real(variable * factors * factor))
        return ct.DistributedGradientTape(tape, op=ct.Sum).gradient(loss, variable)

    got = oracle.in_mode(mode, run)(tf.cast(comm.rank + 1, kind))
    assert where_is(got) == place.device
    oracle.check(got, tf.cast(total * tf.range(5), kind))


def kept(comm: Any, place: Any, mode: str) -> None:
    """A gradient kept by user code does not change, whatever memory it is in; nor do values computed from it."""
    variable = tf.Variable(place.put(np.ones((40, 50), np.float32)))

    def run(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * factor)
        return ct.DistributedGradientTape(tape).gradient(loss, variable)

    traced, held, sums = oracle.in_mode(mode, run), [], []
    for step in range(8):
        got = traced(tf.constant(float(step + comm.rank)))
        sums.append(tf.reduce_sum(got))
        if step in (2, 3, 6):
            held.append(got)
        del got
    middle = (comm.size - 1) / 2
    oracle.assert_close(sums, [tf.constant(2000.0 * (step + middle)) for step in range(8)])
    for step, gradient in zip((2, 3, 6), held, strict=True):
        oracle.check(gradient, np.full((40, 50), step + middle, np.float32))
    held.clear()
    gc.collect()


def sparse(comm: Any, mode: str, as_dense: bool) -> None:
    """Rows of an embedding are reduced together with dense gradients."""
    table, weights = tf.Variable(np.arange(10.0).reshape(5, 2)), tf.Variable([[2.0], [3.0]], dtype=tf.float64)
    rows = [[0, rank % 5, 3] for rank in range(comm.size)]

    def loss_of(own: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.gather(table, own) @ weights))

    def run(own: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(own)
        result = ct.DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(loss, [table, weights])
        assert isinstance(result[0], tf.IndexedSlices) != as_dense
        return list(map(tf.convert_to_tensor, result))

    with tf.GradientTape() as plain:
        loss = loss_of([row for own in rows for row in own]) / comm.size
    expected = list(map(tf.convert_to_tensor, plain.gradient(loss, [table, weights])))
    traced = oracle.in_mode(mode, run)
    for _ in range(2):
        oracle.assert_close(traced(tf.constant(rows[comm.rank])), expected, CLOSE)


def missing(comm: Any, place: Any) -> None:
    """A gradient missing on some ranks counts as zeros there; these ranks get the result, too."""
    ours, theirs = (tf.Variable(place.put(np.ones(3, np.float32))) for _ in range(2))
    for step in range(3):
        alone = step % comm.size == comm.rank
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(ours) + (tf.reduce_sum(theirs) if alone else 0.0)
        first, second = ct.DistributedGradientTape(tape, op=ct.Sum).gradient(loss, [ours, theirs])
        oracle.check(first, np.full(3, comm.size, np.float32))
        oracle.check(second, np.ones(3, np.float32))
        assert where_is(second) == place.device
        del first, second


def joined(comm: Any, place: Any, **options: Any) -> None:
    """A rank that has joined contributes nothing to the reductions of the others."""
    variable = tf.Variable(place.put(np.ones(300, np.float32)))

    def reduced() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * float(comm.rank + 1)
        return ct.DistributedGradientTape(tape, op=ct.Sum, **options).gradient(loss, variable)

    everyone = sum(range(comm.size + 1))
    for _ in range(2):
        np.testing.assert_allclose(reduced(), np.full(300, everyone), rtol=0.02)
    if comm.rank:
        for _ in range(3):
            np.testing.assert_allclose(reduced(), np.full(300, everyone - 1), rtol=0.02)
    ct.join()
    for _ in range(2):
        np.testing.assert_allclose(reduced(), np.full(300, everyone), rtol=0.02)


def fit(comm: Any, passes: int = 1, **settings: Any) -> None:
    """Keras' fit over all ranks matches one process on the whole batch; `passes` batches make a step."""
    model, alone = keras_of.network(), keras_of.network()
    loss = keras.losses.MeanSquaredError(dtype="float64")
    optimizer = ct_keras.DistributedOptimizer(
        keras.optimizers.Adam(0.05), backward_passes_per_step=passes, average_aggregated_gradients=True, **settings
    )
    model.compile(optimizer, loss)
    plain = keras.optimizers.Adam(0.05)
    data = [keras_of.batch(comm, number) for number in range(4)]
    shares = [np.concatenate(parts) for parts in zip(*(keras_of.mine(comm, one) for one in data), strict=True)]
    model.fit(*shares, batch_size=keras_of.ROWS, epochs=2, shuffle=False, verbose=0)
    for start in 2 * list(range(0, len(data), passes)):
        x, y = map(np.concatenate, zip(*data[start : start + passes], strict=True))
        keras_of.step(alone, plain, (x, y))
    keras_of.assert_close(model, alone, CLOSE)
    keras_of.assert_same_everywhere(model)


def compressed(comm: Any, place: Any, mode: str, compression: Any) -> Any:
    """Small whole numbers survive half precision; results of other codecs are close, or lag behind.

    Return the sum over some steps.
    """
    variable = tf.Variable(place.put(np.ones((8, 4), np.float32)))
    factors = tf.reshape(tf.range(32.0), (8, 4))
    options = {"op": ct.Sum, "compression": compression, "compress_within_node": isinstance(compression, str)}

    def run(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * factors * factor)
        return ct.DistributedGradientTape(tape, **options).gradient(loss, variable)

    traced, total, steps = oracle.in_mode(mode, run), np.zeros((8, 4)), 6
    for _ in range(steps):
        got = traced(tf.constant(comm.rank + 1.0))
        assert got.dtype == tf.float32 and where_is(got) == place.device
        total += got.numpy()
        del got
    expected = sum(range(comm.size + 1)) * factors.numpy()
    is_exact = not isinstance(compression, str)
    np.testing.assert_allclose(total / steps, expected, rtol=0 if is_exact else 0.1, atol=0 if is_exact else 2)
    return total


def by_name(comm: Any, place: Any, mode: str) -> None:
    """Operations by name and their gradients."""
    size, rank = comm.size, comm.rank
    x = place.put(np.arange(12, dtype=np.float32).reshape(6, 2) + rank)
    everyone = [np.arange(12, dtype=np.float32).reshape(6, 2) + peer for peer in range(size)]
    splits = [6 // size] * size

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = ct.allreduce(x, op=ct.Sum)
            loss = tf.reduce_sum(total * float(rank + 1))
        return (
            total,
            tape.gradient(loss, x),
            *ct.grouped_allreduce([x, x * 2.0], op=ct.Max),
            ct.allgather(x[: rank + 1]),
            ct.broadcast(x, size - 1),
            ct.reducescatter(x, op=ct.Sum),
            *ct.alltoall(x, splits),
        )

    total, gradient, most, twice, rows, root, part, came, counts = oracle.in_mode(mode, run)(x)
    for tensor in (total, gradient, most, rows, root, part, came):
        assert where_is(tensor) == place.device
    oracle.check(total, sum(everyone))
    oracle.check(gradient, np.full((6, 2), sum(range(size + 1)), np.float32))
    oracle.check(most, everyone[-1])
    oracle.check(twice, 2 * everyone[-1])
    oracle.check(rows, np.concatenate([each[: peer + 1] for peer, each in enumerate(everyone)]))
    oracle.check(root, everyone[-1])
    oracle.check(part, np.array_split(sum(everyone), size)[rank])
    block = 6 // size
    oracle.check(came, np.concatenate([each[rank * block : (rank + 1) * block] for each in everyone]))
    oracle.check(counts, np.full(size, block))


def traced_verbs(comm: Any, place: Any) -> None:
    """Ordered verbs in a traced function run on the device of their tensors."""
    size, rank = comm.size, comm.rank
    x = place.put(np.arange(6, dtype=np.float32).reshape(3, 2) + rank)
    everyone = [np.arange(6, dtype=np.float32).reshape(3, 2) + peer for peer in range(size)]

    @tf.function
    def run(x: Any) -> Any:
        ct.send_recv(x, (rank + 1) % size, x, (rank - 1) % size, ranks=comm)
        rows, counts = ct.all_to_all_v(x[:size], tf.ones(size, tf.int64), ranks=comm)
        return (
            ct.all_reduce(x, ranks=comm),
            ct.all_gather_v(tf.cast(x, tf.bfloat16)[: rank % 3 + 1], ranks=comm),
            ct.broadcast(x, root=0, ranks=comm),
            rows,
            counts,
        )

    total, rows, root, came, counts = run(x)
    assert where_is(total) == where_is(rows) == where_is(root) == where_is(came) == place.device
    oracle.check(total, sum(everyone))
    oracle.check(rows, np.concatenate([each[: peer % 3 + 1] for peer, each in enumerate(everyone)]))
    oracle.check(root, everyone[0])
    oracle.check(came, np.stack([each[rank] for each in everyone]))
    oracle.check(counts, np.ones(size))
    nodes = [node.type for node in run.get_concrete_function(x).graph.get_operations()]
    assert nodes.count("EagerPyFunc") == 5 and "PyFunc" not in nodes


def joined_rows(comm: Any) -> None:
    """A rank that has joined contributes no rows."""
    table = tf.Variable(np.zeros((6, 2)))

    def reduced(row: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [row, 5]))
        return tf.convert_to_tensor(ct.DistributedGradientTape(tape, op=ct.Average).gradient(loss, table))

    own = comm.rank % 4
    for first in (0, 1):
        if comm.rank >= first:
            expected = np.zeros((6, 2))
            for rank in range(first, comm.size):
                expected[[rank % 4, 5]] += 1 / comm.size
            oracle.assert_close(reduced(own), tf.constant(expected), CLOSE)
    ct.join()
