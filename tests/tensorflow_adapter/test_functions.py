"""Broadcasts of variables and objects to all ranks, and elastic state."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from tests.tensorflow_adapter.oracle import MODES, assert_same_everywhere, check, in_mode

both = pytest.mark.parametrize("mode", MODES)


def some_variables(comm: Any) -> list[Any]:
    dtypes = [tf.float32, tf.bfloat16, tf.int64, tf.bool]
    result: list[Any] = [tf.Variable(tf.cast(tf.fill([3, 2], comm.rank), dtype)) for dtype in dtypes]
    result.append(tf.Variable(float(comm.rank)))
    result.append(keras.Variable(np.full((40, 40), comm.rank, np.float32), name="of_keras"))
    return result


@both
def test_broadcast_variables(comm: Any, mode: str) -> None:
    root = comm.size - 1
    first, second = some_variables(comm), some_variables(comm)

    def run() -> None:
        hvd.broadcast_variables(first, root)
        hvd.broadcast_(second, root)

    in_mode(mode, run)()
    for variable in (*first, *second):
        value = tf.convert_to_tensor(variable)
        check(value, tf.cast(tf.fill(value.shape, root), value.dtype))


def test_variables_do_not_share_memory_afterwards(comm: Any) -> None:
    """An assigned variable may adopt the given memory, but not share it with another one or with the next broadcast."""
    variables = [tf.Variable(tf.fill([5000], float(comm.rank))) for _ in range(2)]
    hvd.broadcast_variables(variables, 0)
    variables[0].assign_add(tf.ones(5000))
    before = [variable.numpy() for variable in variables]
    hvd.broadcast_variables([tf.Variable(tf.fill([5000], 77.0)) for _ in range(2)], 0)
    for variable, value, expected in zip(variables, before, (1.0, 0.0), strict=True):
        assert np.all(value == expected)
        check(variable.read_value(), value)


def test_a_value_that_is_no_variable_is_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match=r"entry 0 is a .*, expected a variable"):
        hvd.broadcast_variables([tf.ones(2)], 0)
    with pytest.raises(UsageError, match=r"words.*: .*string"):
        hvd.broadcast_variables([tf.Variable("text", name="words")], 0)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    assert hvd.broadcast_variables([], 0) is None


def test_broadcast_in_a_graph_of_tensorflow_1(comm: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=[float(comm.rank)], use_resource=True)
        update = hvd.broadcast_global_variables(comm.size - 1)
        session.run(v1.global_variables_initializer())
        session.run(update)
        assert session.run(variable) == [comm.size - 1.0]


def test_the_hook_of_monitored_sessions(comm: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[float(comm.rank)], use_resource=True)
        with v1.train.MonitoredSession(hooks=[hvd.BroadcastGlobalVariablesHook(comm.size - 1)]) as session:
            assert session.run(variable) == [comm.size - 1.0]


def test_objects(comm: Any) -> None:
    root = comm.size - 1
    assert hvd.broadcast_object({"rank": comm.rank}, root) == {"rank": root}
    assert hvd.broadcast_object_fn(root)(comm.rank) == root
    assert hvd.allgather_object(comm.rank) == list(range(comm.size))


def small_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    return model


def test_elastic_state_of_a_model(comm: Any) -> None:
    model = small_model(seed=comm.rank)
    state: Any = hvd.elastic.TensorFlowKerasState(model, epoch=comm.rank)
    state.sync()
    assert state.epoch == 0
    assert_same_everywhere(comm, model.variables)
    saved = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    model.train_on_batch(x, y)
    state.epoch = 5
    assert not np.array_equal(saved[0], model.variables[0].numpy())
    state.restore()
    assert state.epoch == 0
    for variable, value in zip((*model.variables, *model.optimizer.variables), saved, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    model.train_on_batch(x, y)
    state.epoch = 1
    state.commit()
    trained = model.variables[0].numpy()
    model.train_on_batch(x, y)
    state.restore()
    assert state.epoch == 1
    np.testing.assert_array_equal(model.variables[0].numpy(), trained)


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, lambda optimizer, **options: optimizer])
def test_a_commit_between_accumulating_passes_is_warned_of(comm: Any, wrap: Any) -> None:
    model = small_model(seed=0)
    model.compile(wrap(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)), loss="mse")
    state: Any = hvd.elastic.TensorFlowKerasState(model)
    for passes in (1, 2):
        model.train_on_batch(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))
        with pytest.warns(UserWarning, match="between the passes") if passes == 1 else warnings.catch_warnings():
            warnings.simplefilter("error" if passes == 2 else "always")
            state.commit()


@both
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("where", [tf.py_function, tf.numpy_function])
def test_elastic_run_restores_after_an_error_in_a_python_function(comm: Any, mode: str, where: Any) -> None:
    """Regression: TensorFlow converted a HorovodInternalError raised by the program to UnknownError: the job ended."""
    variable = tf.Variable([float(comm.rank)])
    seen: list[float] = []

    def look() -> Any:
        if comm.rank == comm.size - 1 and len(seen) == 1:
            raise hvd.HorovodInternalError("two\nlines: of it")
        return np.float32(1)

    reduce = in_mode(mode, lambda: hvd.allreduce(where(look, [], tf.float32), op=hvd.Sum, name="after look"))

    @hvd.elastic.run
    def train(state: Any) -> tf.Tensor:
        seen.append(float(variable[0]))
        variable.assign_add([10.0])
        return reduce()

    check(train(hvd.elastic.TensorFlowState([variable])), tf.constant(float(comm.size)))
    assert seen == [0.0, 0.0]
    with pytest.raises(tf.errors.UnknownError, match="ZeroDivisionError"):  # not one of ours
        hvd.elastic.run(lambda state: tf.py_function(lambda: 1 / 0, [], tf.float32))(hvd.elastic.ObjectState())


def test_passes_restart_after_a_change_of_hosts(comm: Any) -> None:
    """Regression: all ranks got rank 0's accumulated gradients, and later updates followed the first of two passes."""
    data = np.random.default_rng(1).standard_normal((6, 4 * comm.size, 3))

    def build(distribute: Any) -> tuple[Any, Any]:
        model = small_model(seed=0)
        optimizer = distribute(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def step(model: Any, optimizer: Any, x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.constant(x)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    model, optimizer = build(lambda plain: hvd.DistributedOptimizer(plain, backward_passes_per_step=2))
    state: Any = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
    raised: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 3:
            for number in range(2):
                step(model, optimizer, data[2 * state.step + number, comm.rank :: comm.size])
                if state.step == 1 and not raised:
                    raised.append(number)
                    raise hvd.elastic.HostsUpdatedInterrupt
            state.step += 1
            state.commit()

    train(state)
    alone, plain = build(lambda plain: plain)
    for number in range(3):  # the sum of two means over equal numbers of rows
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean(alone(tf.constant(x)) ** 2) for x in data[2 * number : 2 * number + 2])
        plain.apply_gradients(
            zip(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables, strict=True)
        )
    assert raised == [0]
    for ours, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@both
@pytest.mark.ranks(min=2)
def test_elastic_run_restores_and_tries_again(comm: Any, mode: str) -> None:
    variable = tf.Variable([float(comm.rank)])
    state = hvd.elastic.TensorFlowState([variable], attempts=0)
    reduce = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, name="elastic"))
    attempts = []

    @hvd.elastic.run
    def train(state: Any) -> tf.Tensor:
        attempts.append(float(variable[0]))
        variable.assign_add([10.0])
        return reduce(tf.ones(2 if len(attempts) > 1 else comm.rank + 1))

    check(train(state), tf.ones(2) * comm.size)
    assert attempts == [0.0, 0.0]
    check(variable.read_value(), tf.constant([10.0]))


def test_elastic_run_restores_after_an_error_of_the_program(comm: Any) -> None:
    """Regression: HorovodInternalError within `run` ended the job. HostsUpdatedInterrupt keeps the state."""
    variable = tf.Variable([float(comm.rank)])
    state = hvd.elastic.TensorFlowState([variable])
    seen: list[float] = []
    resets: list[int] = []

    def train(state: Any) -> str:
        seen.append(float(variable[0]))
        variable.assign_add([10.0])
        if len(seen) == 1:
            raise hvd.HorovodInternalError("by hand")
        if len(seen) == 2:
            raise hvd.elastic.HostsUpdatedInterrupt
        return "done"

    assert hvd.elastic.run_fn(train, lambda: resets.append(1))(state) == "done"
    assert seen == [0.0, 0.0, 10.0] and len(resets) == 2


@both
@pytest.mark.ranks(min=2)
def test_elastic_run_if_only_one_rank_raises(comm: Any, mode: str) -> None:
    """Regression: the others waited for its gradients by name until COMMLIB_TIMEOUT, or for ever."""
    data = np.random.default_rng(1).standard_normal((4, 2 * comm.size, 3))

    def build(distribute: Any) -> tuple[Any, Any, Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float64")])
        optimizer = distribute(keras.optimizers.SGD(0.1, momentum=0.5))
        optimizer.build(model.trainable_variables)

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )

        return model, optimizer, step

    alone, _, step = build(lambda optimizer: optimizer)
    for batch in data:
        step(tf.constant(batch))
    model, optimizer, step = build(hvd.DistributedOptimizer)
    step = in_mode(mode, step)
    state: Any = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        calls.append(state.batch)
        while state.batch < 4:
            if state.batch == 3 and len(calls) == 1 and comm.rank == comm.size - 1:
                raise hvd.HorovodInternalError("by hand")
            step(tf.constant(data[state.batch, comm.rank :: comm.size]))
            state.batch += 1
            if state.batch == 2:
                state.commit()
        return "done"

    assert train(state) == "done"
    assert calls == [0, 2]
    for ours, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)
