"""Graphs of TensorFlow 1 run independent operations together, whatever order each rank begins them in."""

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import MismatchError

COUNT = 8

few_threads = pytest.mark.parametrize("threads", [1, 2])


def session(threads: int) -> Any:
    """A session with its own threads for operations."""
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=True)
    return tf.compat.v1.Session(config=config)


def late(x: Any, seconds: float) -> Any:
    """Return the same tensor after a delay."""

    def wait(array: Any) -> Any:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [x], x.dtype, stateful=False)  # so that these are not ordered either
    result.set_shape(x.shape)
    return result


def another_order(comm: Any) -> list[int]:
    """Return the numbers of the operations in a different order on every rank."""
    return [int(number) for number in np.random.default_rng(comm.rank).permutation(COUNT)]


@few_threads
@pytest.mark.parametrize("delayed", [False, True])
def test_many_independent_operations_in_one_run(comm: Any, threads: int, delayed: bool) -> None:
    """Regression: they hung: ranks began different ones, each of which blocked a thread of TensorFlow's."""
    random = np.random.default_rng(100 + comm.rank)
    with tf.Graph().as_default():
        outcomes: list[Any] = [None] * COUNT
        for number in another_order(comm):
            x = tf.constant([float(number), float(comm.rank)])
            if delayed:
                x = late(x, random.uniform(0, 0.02))
            outcomes[number] = hvd.allreduce(x, op=hvd.Sum, name=f"number {number}")
        with session(threads) as run:
            for _ in range(3):
                results = run.run(outcomes)
    ranks = sum(range(comm.size))
    np.testing.assert_array_equal(results, [[number * comm.size, ranks] for number in range(COUNT)])


@few_threads
def test_gradients_of_many_independent_operations(comm: Any, threads: int) -> None:
    """Their gradients arrive in a different order on every rank."""
    with tf.Graph().as_default():
        xs = [tf.constant([1.0 + number, 2.0 + comm.rank]) for number in range(COUNT)]
        ys = [hvd.allreduce(x * x, op=hvd.Sum, name=f"number {number}") for number, x in enumerate(xs)]
        back: dict[int, Any] = {}
        for number in another_order(comm):
            with tf.control_dependencies(list(back.values())[-1:]):
                back[number] = late(tf.fill([2], float(comm.rank + 1)), 0.001)
        values = [tf.gradients(y, x, back[number])[0] for number, (x, y) in enumerate(zip(xs, ys, strict=True))]
        with session(threads) as run:
            results = run.run(values)
    factor = 2.0 * sum(range(1, comm.size + 1))
    expected = [[factor * (1.0 + number), factor * (2.0 + comm.rank)] for number in range(COUNT)]
    np.testing.assert_array_equal(results, expected)


def test_gradients_outside_of_a_traced_function(comm: Any) -> None:
    """Regression: TensorFlow does not order operations in the gradient function, which hung like sessions."""
    order = another_order(comm)

    @tf.function
    def forward(*xs: Any) -> Any:
        reduced = [hvd.allreduce(x * x, op=hvd.Sum, name=f"outside {number}") for number, x in enumerate(xs)]
        return [slow_backward(y, 0.02 * order.index(number)) for number, y in enumerate(reduced)]

    xs = [tf.Variable([1.0 + number, 2.0]) for number in range(COUNT)]
    with tf.GradientTape() as tape:
        ys = forward(*xs)
    for number, gradient in enumerate(tape.gradient(ys, xs)):
        np.testing.assert_array_equal(gradient, 2.0 * comm.size * np.array([1.0 + number, 2.0]))


def slow_backward(x: Any, seconds: float) -> Any:
    """Return the same tensor; its gradient is delayed."""
    return tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: late(dy, seconds)))(x)


def test_a_wrapped_graph_of_tensorflow_1(comm: Any) -> None:
    def build(x: Any) -> Any:
        results: list[Any] = [None] * COUNT
        for number in another_order(comm):
            results[number] = hvd.allreduce(x * float(number), op=hvd.Sum, name=f"wrapped {number}")
        return results

    wrapped = tf.compat.v1.wrap_function(build, [tf.TensorSpec([2])])
    for number, result in enumerate(wrapped(tf.ones(2))):
        np.testing.assert_array_equal(result, [number * comm.size] * 2)


def test_every_verb_at_once_on_one_thread(comm: Any) -> None:
    order = another_order(comm)
    with tf.Graph().as_default():
        x = tf.constant(np.arange(2 * comm.size, dtype=np.float32) + comm.rank)
        verbs = [
            lambda: hvd.allreduce(x, op=hvd.Max, name="allreduce"),
            lambda: hvd.grouped_allreduce([x, 2 * x], op=hvd.Max, name="grouped"),
            lambda: hvd.allgather(x[:1], name="allgather"),
            lambda: hvd.broadcast(x, comm.size - 1, name="broadcast"),
            lambda: hvd.alltoall(x, name="alltoall"),
            lambda: hvd.reducescatter(x, op=hvd.Sum, name="reducescatter"),
            lambda: hvd.grouped_allgather([x[:1], x[:2]], name="gathers"),
            lambda: [hvd.rank_op(), hvd.size_op()],
        ]
        nodes: list[Any] = [None] * COUNT
        for number in order:
            nodes[number] = verbs[number]()
        with session(1) as run:
            results = run.run(nodes)
    mine = [np.arange(2 * comm.size) + rank for rank in range(comm.size)]
    last, both = mine[-1], slice(2 * comm.rank, 2 * comm.rank + 2)
    np.testing.assert_array_equal(results[0], last)
    np.testing.assert_array_equal(results[1], [last, 2 * last])
    np.testing.assert_array_equal(results[2], [part[0] for part in mine])
    np.testing.assert_array_equal(results[3], last)
    np.testing.assert_array_equal(results[4], np.concatenate([part[both] for part in mine]))
    np.testing.assert_array_equal(results[5], np.sum(mine, axis=0)[both])
    np.testing.assert_array_equal(results[6][1], np.concatenate([part[:2] for part in mine]))
    assert results[7] == [comm.rank, comm.size]


@few_threads
def test_operations_in_a_loop_and_in_a_branch(comm: Any, threads: int) -> None:
    with tf.Graph().as_default():

        def step(count: Any, total: Any) -> Any:
            return count + 1, hvd.allreduce(total, op=hvd.Sum, name="in a loop")

        _, looped = tf.compat.v1.while_loop(lambda count, _: count < 3, step, [tf.constant(0), tf.ones(2)])
        flag = tf.compat.v1.placeholder(tf.bool, [])
        branch = tf.cond(flag, lambda: hvd.allgather(tf.ones([1]), name="in a branch"), lambda: tf.zeros([1]))
        with session(threads) as run:
            taken = run.run([looped, branch], {flag: True})
            left = run.run([looped, branch], {flag: False})
    np.testing.assert_array_equal(taken[0], [float(comm.size) ** 3] * 2)
    np.testing.assert_array_equal(left[0], taken[0])
    np.testing.assert_array_equal(taken[1], [1.0] * comm.size)
    np.testing.assert_array_equal(left[1], [0.0])


def test_only_what_is_fetched_runs(comm: Any) -> None:
    """One of several operations can run alone, without the others."""
    with tf.Graph().as_default():
        results = [hvd.allreduce(tf.ones(2), op=hvd.Sum, name=f"alone {number}") for number in range(3)]
        with session(1) as run:
            np.testing.assert_array_equal(run.run(results[1]), [comm.size] * 2)


def test_traced_functions_within_a_graph_of_sessions(comm: Any) -> None:
    """Regression: two independent functions are two chains, each of which blocked a thread."""
    order = another_order(comm)
    with tf.Graph().as_default():
        outcomes: list[Any] = [None] * COUNT
        for number in order:
            reduce = tf.function(lambda x, number=number: hvd.allreduce(x, op=hvd.Sum, name=f"traced {number}"))
            outcomes[number] = reduce(tf.ones(2) * float(number))
        with session(2) as run:
            results = run.run(outcomes)
    np.testing.assert_array_equal(results, [[number * comm.size] * 2 for number in range(COUNT)])


@pytest.mark.ranks(min=2)
def test_an_error_within_a_session(comm: Any) -> None:
    with tf.Graph().as_default():
        wrong = hvd.allreduce(tf.ones(2 + comm.rank), name="wrong")
        right = hvd.allreduce(tf.ones(2), op=hvd.Sum, name="right")
        with session(1) as run:
            with pytest.raises(MismatchError, match=r"shape is .* on rank 0 but"):
                run.run(wrong)
            np.testing.assert_array_equal(run.run(right), [comm.size] * 2)


@few_threads
def test_an_optimizer_that_starts_groups_as_they_become_ready(comm: Any, threads: int) -> None:
    """Regression: two simultaneous starts negotiated with the other ranks under one name."""
    with tf.Graph().as_default():
        variables = [tf.Variable(tf.fill([3], float(number)), use_resource=True) for number in range(COUNT)]
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), groups=4, overlap=True, name=f"starts {threads}"
        )
        loss = sum(tf.reduce_sum(variable) * float(comm.rank) for variable in variables)
        step = optimizer.minimize(loss, var_list=variables)
        with session(threads) as run:
            run.run(tf.compat.v1.global_variables_initializer())
            run.run(step)
            run.run(step)
            results = run.run(variables)
    mean = (comm.size - 1) / 2
    np.testing.assert_array_equal(results, [[number - 2 * mean] * 3 for number in range(COUNT)])


def test_broadcast_in_place(comm: Any) -> None:
    """Regression: it returned the variables, so that running them ran no broadcast."""
    with tf.Graph().as_default():
        variables = [tf.Variable(tf.ones(count) * float(comm.rank)) for count in (2, 3)]
        results = hvd.broadcast_(variables, comm.size - 1)
        with session(2) as run:
            run.run(tf.compat.v1.global_variables_initializer())
            for count, result in zip((2, 3), run.run(results), strict=True):
                np.testing.assert_array_equal(result, [comm.size - 1] * count)
            for count, value in zip((2, 3), run.run(variables), strict=True):
                np.testing.assert_array_equal(value, [comm.size - 1] * count)


def test_a_barrier_is_an_operation(comm: Any) -> None:
    """Regression: it returned nothing that could be run."""
    began: list[float] = []
    with tf.Graph().as_default():
        met = hvd.barrier()
        with session(1) as run:
            time.sleep(0.05 * comm.rank)
            began.append(time.monotonic())
            run.run(met)
    assert time.monotonic() >= max(comm.all_gather_object(began[0]))
