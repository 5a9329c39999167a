"""Process sets: operations on some of the ranks, and ranks that have run out of data."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from tests.tensorflow_adapter.oracle import MODES, assert_close, check, in_mode

both = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def ends(comm: Any) -> Iterator[Any]:
    """The process set of the first and the last rank."""
    process_set = hvd.add_process_set([0, comm.size - 1])
    yield process_set
    assert hvd.remove_process_set(process_set)


@both
@pytest.mark.ranks(min=3)
def test_operations_of_some_ranks(comm: Any, ends: Any, mode: str) -> None:
    last = comm.size - 1

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = hvd.allreduce(x, op=hvd.Sum, process_set=ends)
            loss = tf.reduce_sum(hvd.allgather(x, process_set=ends) * tf.constant([1.0, 2.0]))
        return (
            total,
            tape.gradient(loss, x),
            hvd.broadcast(x, last, process_set=ends),
            hvd.reducescatter(tf.concat([x, x], 0), op=hvd.Sum, process_set=ends),
            hvd.alltoall(tf.concat([x, x], 0), [1, 1], process_set=ends)[1],
            hvd.size_op(ends.process_set_id),
            hvd.process_set_included_op(ends.process_set_id),
        )

    x = tf.constant([comm.rank + 1.0])
    if not ends.included():
        assert int(hvd.process_set_included_op(ends.process_set_id)) == 0
        with pytest.raises(UsageError, match=f"rank {comm.rank} is not in"):
            hvd.allreduce(x, process_set=ends)
        return
    total, gradient, broadcast, part, received, size, included = in_mode(mode, run)(x)
    check(total, tf.constant([last + 2.0]))
    assert_close(gradient, tf.constant([1.0 if comm.rank == 0 else 2.0]))
    check(broadcast, tf.constant([last + 1.0]))
    check(part, tf.constant([last + 2.0]))
    check(received, tf.constant([1, 1]))
    assert (int(size), int(included)) == (2, 1)
    hvd.barrier(ends)


@pytest.mark.ranks(min=3)
def test_variables_objects_and_gradients_of_some_ranks(comm: Any, ends: Any) -> None:
    if not ends.included():
        return
    last = comm.size - 1
    variable = tf.Variable([float(comm.rank)])
    hvd.broadcast_variables([variable], last, process_set=ends)
    check(variable.read_value(), tf.constant([float(last)]))
    assert hvd.broadcast_object(comm.rank, last, process_set=ends) == last
    assert hvd.allgather_object(comm.rank, process_set=ends) == [0, last]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * (comm.rank + 1.0))
    (gradient,) = hvd.DistributedGradientTape(tape, process_set=ends).gradient(loss, [variable])
    check(gradient, tf.constant([1 + last / 2]))


@both
@pytest.mark.ranks(min=3)
def test_gradients_of_a_rank_outside_the_set(comm: Any, ends: Any, mode: str) -> None:
    """Regression: it raised. Gradients stay local, as with Horovod, so a script may train differently in every set."""
    variable = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=ends, name=f"ends {mode}")

    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (comm.rank + 1.0))
        plain = tape.gradient(loss, [variable])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (comm.rank + 1.0))
        gradients = hvd.DistributedGradientTape(tape, process_set=ends).gradient(loss, [variable])
        optimizer.apply(plain, [variable])
        return gradients[0]

    expected = 1.0 + (comm.size - 1) / 2 if ends.included() else comm.rank + 1.0
    check(in_mode(mode, run)(), tf.constant([expected]))
    check(variable.read_value(), tf.constant([1.0 - expected]))


@both
def test_join(comm: Any, mode: str) -> None:
    step = in_mode(mode, lambda x: hvd.allreduce(x, name="step"))
    for number in range(comm.rank + 1):
        present = range(number, comm.size)  # rank r takes r + 1 steps
        expected = sum(rank + 1 for rank in present) / comm.size
        assert_close(step(tf.constant(comm.rank + 1.0)), tf.constant(expected), 1e-6)
    last = int(in_mode(mode, hvd.join)())
    assert last == comm.size - 1
    check(step(tf.ones(2)), tf.ones(2))


@pytest.mark.parametrize("overlap", [False, True])
def test_join_while_others_train(comm: Any, overlap: bool) -> None:
    """This includes the first step, in which ranks agree on the layout."""
    from commlib_tensorflow.gradients import TensorReducer

    reducer = TensorReducer(f"join {overlap}", groups=2, overlap=overlap)
    step = tf.function(lambda *gradients: reducer(gradients, ["a", "b", "c"]))
    for number in range(comm.rank):
        gradients = [tf.fill([2], float(comm.rank)), tf.fill([3], float(comm.rank)), tf.fill([], float(comm.rank))]
        mean = sum(rank for rank in range(comm.size) if rank > number) / comm.size
        for got, given in zip(step(*gradients), gradients, strict=True):
            assert_close(got, np.full(given.shape, mean, np.float32), 1e-6)
    hvd.join()
