"""Gradients of a tape match one process on the whole batch."""

import threading
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow.gradients import TensorReducer
from tests.tensorflow_adapter.oracle import (
    MODES,
    assert_close,
    assert_same_everywhere,
    batch,
    check,
    in_mode,
    loss_of,
    mine,
    weights,
)

both = pytest.mark.parametrize("mode", MODES)
COMPLEX = (tf.complex64, tf.complex128)


def train(comm: Any, mode: str, **options: Any) -> list[Any]:
    """Return the variables after some steps on this rank's rows."""
    variables = weights()

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, (x, y))
        gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    run = in_mode(mode, step)
    for number in range(3):
        run(*mine(comm, batch(comm, number)))
    return variables


def train_alone(comm: Any) -> list[Any]:
    variables = weights()
    for number in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, batch(comm, number))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
    return variables


@both
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_predivide_factor": 4.0}, {"num_groups": 2}, {"groups": 3}, {"op": hvd.Average}],
    ids=str,
)
def test_training_equals_one_process(comm: Any, options: Any, mode: str) -> None:
    variables = train(comm, mode, **options)
    assert_close(variables, train_alone(comm))
    assert_same_everywhere(comm, variables)


@both
def test_sum_and_compression(comm: Any, mode: str) -> None:
    variable = tf.Variable([1.0, 2.0])

    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * tf.constant([1.0, 2.0]) * (comm.rank + 1.0))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=hvd.Compression.fp16)
        return tape.gradient(loss, variable)

    total = sum(range(comm.size + 1))
    check(in_mode(mode, run)(), tf.constant([1.0 * total, 2.0 * total]))


def test_the_wrapped_tape_is_a_tape(comm: Any) -> None:
    variable, constant = tf.Variable(3.0), tf.constant(2.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        assert isinstance(tape, tf.GradientTape)
        tape.watch(constant)
        y = variable * constant * (comm.rank + 1.0)
        with tape.stop_recording():
            unseen = y * y
    assert tape.gradient(unseen, [constant]) == [None]
    mean = sum(range(comm.size + 1)) / comm.size
    assert_close(tape.gradient(y, {"v": variable, "c": constant})["v"], tf.constant(2.0 * mean), 1e-6)
    assert_close(tape.gradient(y, [constant])[0], tf.constant(3.0 * mean), 1e-6)
    assert tape.watched_variables() == (variable,)
    assert_close(tape.jacobian(y, variable), tf.constant(2.0 * (comm.rank + 1)), 1e-6)  # this rank's


@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"compression": hvd.Compression.bf16}], ids=str)
def test_forward_mode_through_reduced_gradients(comm: Any, options: Any) -> None:
    """Regression: the derivative of the reduced gradients was None."""
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    directions = [tf.constant([1.0, 0.5]), tf.constant(2.0)]
    with tf.autodiff.ForwardAccumulator(variables, directions) as accumulator:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] ** 3 * variables[1]) * (comm.rank + 1.0)
        reduced = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
    total = sum(range(comm.size + 1)) / (1 if options.get("op") == hvd.Sum else comm.size)
    (x, y), (along_x, along_y) = variables, directions
    check(reduced[0], 3 * x**2 * y * total)
    check(accumulator.jvp(reduced[0]), (6 * x * y * along_x + 3 * x**2 * along_y) * total)
    check(accumulator.jvp(reduced[1]), tf.reduce_sum(3 * x**2 * along_x) * total)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("options", [{"compression": "int8"}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_forward_mode_through_compressed_gradients_is_refused(comm: Any, options: Any) -> None:
    variable = tf.Variable([1.0, 2.0])
    with tf.autodiff.ForwardAccumulator(variable, tf.ones(2)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**3)
        with pytest.raises(UsageError, match=r"DistributedGradientTape: forward mode .*compression beyond a cast"):
            hvd.DistributedGradientTape(tape, **options).gradient(loss, variable)


@both
@pytest.mark.ranks(min=2)
def test_gradients_of_reduced_gradients_are_refused(comm: Any, mode: str) -> None:
    """Regression: they were None, so that a sum of other terms lacked them."""
    variable = tf.Variable([1.0, 2.0])

    def run() -> Any:
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**3)
            reduced = hvd.DistributedGradientTape(tape).gradient(loss, variable)
            both = tf.reduce_sum(reduced) + tf.reduce_sum(variable)
        check_plain(outer.gradient(loss, variable))
        return outer.gradient(both, variable)

    @tf.autograph.experimental.do_not_convert
    def check_plain(gradient: Any) -> None:
        assert gradient is not None

    with pytest.raises(UsageError, match=r"reduced gradients have no gradients: .*grouped_allreduce"):
        in_mode(mode, run)()


@both
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_an_embedding_equals_one_process(comm: Any, sparse_as_dense: bool, mode: str) -> None:
    table = tf.Variable(np.arange(10.0).reshape(5, 2))
    rows = [[0, rank % 5, 3] for rank in range(comm.size)]

    def loss_of_rows(rows: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.gather(table, rows)))

    def run(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of_rows(rows)
        gradient = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense).gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices) != sparse_as_dense
        return tf.convert_to_tensor(gradient)

    with tf.GradientTape() as tape:
        loss = loss_of_rows([row for own in rows for row in own]) / comm.size
    assert_close(in_mode(mode, run)(tf.constant(rows[comm.rank])), tape.gradient(loss, table))


@both
@pytest.mark.parametrize("scale", [False, True])
def test_local_sources_stay_local(comm: Any, scale: bool, mode: str) -> None:
    shared, own, table = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(tf.ones([3, 1]))
    factor = comm.rank + 1.0

    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = factor * (shared + own + tf.reduce_sum(tf.gather(table, [1])))
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(own)
        tape.register_local_source(table)
        first, second, third = tape.gradient(loss, [shared, own, table])
        return first, second, tf.convert_to_tensor(third)

    first, second, third = in_mode(mode, run)()
    assert_close(first, tf.constant(sum(range(comm.size + 1)) / comm.size, tf.float32), 1e-6)
    expected = factor / comm.size if scale else factor
    assert_close(second, tf.constant(expected, tf.float32), 1e-6)
    assert_close(third, tf.constant([[0.0], [expected], [0.0]], tf.float32), 1e-6)


def test_local_layers(comm: Any) -> None:
    import keras

    shared, own = keras.layers.Dense(1, kernel_initializer="ones"), keras.layers.Dense(1, kernel_initializer="ones")
    x = tf.ones([1, 1]) * (comm.rank + 1.0)
    own(shared(x))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own(shared(x)))
    sources = [shared.kernel, own.kernel.value]
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=[own])
    gradients = tape.gradient(loss, [v.value if hasattr(v, "value") and not callable(v.value) else v for v in sources])
    assert_close(gradients[0], tf.constant([[sum(range(comm.size + 1)) / comm.size]], tf.float32), 1e-6)
    assert_close(gradients[1], tf.constant([[(comm.rank + 1.0) / comm.size]], tf.float32), 1e-6)
    with pytest.raises(UsageError, match="layers of Keras"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


@both
def test_none_stays_none(comm: Any, mode: str) -> None:
    used, unused = tf.Variable(1.0), tf.Variable(1.0)

    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = used * (comm.rank + 1.0)
        first, second = hvd.DistributedGradientTape(tape).gradient(loss, [used, unused])
        assert second is None
        return first

    assert_close(in_mode(mode, run)(), tf.constant(sum(range(comm.size + 1)) / comm.size, tf.float32), 1e-6)


# The reducer


def many_gradients(comm: Any, dtype: Any = tf.float32) -> tuple[list[Any], list[Any]]:
    """Return this rank's gradients, enough for several buckets, with a None and a sparse one; and their dense means."""
    shapes = [(300, 700), (7,), (600, 600), (), (2, 3)]
    random = np.random.default_rng(5)
    everyone = [[random.integers(-9, 9, size=shape) for shape in shapes] for _ in range(comm.size)]
    own: list[Any] = [tf.constant(values, dtype) for values in everyone[comm.rank]]
    means: list[Any] = [tf.constant(sum(values) / comm.size, dtype) for values in zip(*everyone, strict=True)]
    own.insert(1, None)
    means.insert(1, None)
    own.append(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([comm.rank % 2]), tf.constant([2, 2])))
    rows = np.array([[sum(rank % 2 == row for rank in range(comm.size))] * 2 for row in range(2)]) / comm.size
    means.append(tf.constant(rows, tf.float32))
    return own, means


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_overlap_does_not_change_results(comm: Any, compression: str) -> None:
    own, means = many_gradients(comm)
    names = [f"variable {index}" for index in range(len(own))]
    results = []
    for overlap in (False, True, None):
        reducer = TensorReducer(
            f"{compression} {overlap}", compression=getattr(hvd.Compression, compression), overlap=overlap
        )
        results.append(reducer(own, names))
        assert comm.size == 1 or len(reducer.reducers[0].buckets) > 1

        @tf.function
        def traced(tensors: Any, slices: Any, reducer: Any = reducer) -> Any:
            return reducer([tensors[0], None, *tensors[1:], slices], names)

        for _ in range(2):
            results.append(traced([g for g in own[:-1] if g is not None], own[-1]))
    for result in results:
        assert_close(result, means, 1e-6 if compression == "none" else 0.04)
        for one, other in zip(result[:-1], results[0][:-1], strict=True):
            assert one is other is None or np.array_equal(one.numpy(), other.numpy())


@both
def test_memory_of_results_is_reused_only_when_free(comm: Any, mode: str) -> None:
    """A variable adopts the memory of a result that is assigned to it."""
    reducer = TensorReducer(f"memory {mode}", op=hvd.Sum)
    step = in_mode(mode, lambda x: reducer([x], ["x"])[0])
    variable = tf.Variable(tf.zeros(50_000))
    kept = []
    for number in range(6):
        result = step(tf.fill([50_000], float(number)))
        if number == 1:
            variable.assign(result)
        if number == 2:
            kept.append(result)
        del result
    check(variable.read_value(), tf.fill([50_000], 1.0 * comm.size))
    check(kept[0], tf.fill([50_000], 2.0 * comm.size))
    if comm.size > 1:
        engine = reducer.reducers[0].engine
        assert engine.is_private(0)  # the variable keeps the slot's memory
        variable.assign(tf.zeros(50_000))
        kept.clear()
        step(tf.zeros([50_000]))
        assert not engine.is_private(0)


def test_reductions_start_in_reverse_order_of_variables(comm: Any) -> None:
    """A traced function runs its stateful nodes in the order of their creation."""
    reducer = TensorReducer("order", groups=[["a", "b"], ["c"], ["d"]], overlap=True)
    traced = tf.function(lambda *gradients: reducer(gradients, ["a", "b", "c", "d"]))
    traced(*(tf.ones(1) for _ in range(4)))
    if comm.size > 1:
        nodes = traced.get_concrete_function(*(tf.ones(1) for _ in range(4))).graph.get_operations()
        launched = [
            sorted(str(tensor.op.name) for tensor in node.inputs) for node in nodes if node.type.endswith("PyFunc")
        ]
        assert len(launched) == 4
        assert launched[:3] == [["gradients_3"], ["gradients_2"], ["gradients_0", "gradients_1"]]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_input_gradients_are_not_modified(comm: Any, overlap: bool) -> None:
    reducer = TensorReducer(f"given {overlap}", op=hvd.Sum, groups=2, overlap=overlap)

    @tf.function
    def step(x: Any) -> Any:
        given = [x * 3.0, x * 2.0]
        return given, reducer(given, ["a", "b"])

    given, _ = step(tf.fill([100], comm.rank + 1.0))
    for got, factor in zip(given, (3.0, 2.0), strict=True):
        check(got, tf.fill([100], factor * (comm.rank + 1.0)))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_start_while_backward_runs(comm: Any, overlap: bool, monkeypatch: Any) -> None:
    """The first layer's gradient waits until the last layer's is launched, which requires overlap."""
    launched = threading.Event()
    seen = []

    launch = BucketReducer.launch

    def note_launch(self: BucketReducer, index: int) -> None:
        launch(self, index)
        launched.set()

    def wait(gradient: Any) -> Any:
        seen.append(launched.wait(20.0 if overlap else 0.2))
        return gradient

    monkeypatch.setattr(BucketReducer, "launch", note_launch)

    @tf.custom_gradient
    def hold_up(x: Any) -> Any:
        def backward(dy: Any) -> Any:
            result = tf.numpy_function(wait, [dy], dy.dtype, stateful=False)
            result.set_shape(dy.shape)
            return result

        return tf.identity(x), backward

    first, last = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    reducer = TensorReducer(f"while {overlap}", groups=2, overlap=overlap)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(last * tf.tanh(hold_up(first) * x))
        return reducer(tape.gradient(loss, [first, last]), ["first", "last"])

    results = step(tf.constant(comm.rank + 1.0))
    assert seen == [overlap]
    for one, other in zip(results, step(tf.constant(comm.rank + 1.0)), strict=True):
        check(one, other)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("overlap", [False, True])
@both
def test_different_gradients_are_an_error_everywhere(comm: Any, mode: str, overlap: bool) -> None:
    reducer = TensorReducer(f"different {mode} {overlap}", groups=2, overlap=overlap)
    odd = comm.rank == comm.size - 1

    def reduce(missing: bool) -> Any:
        run = in_mode(mode, lambda: reducer([tf.ones(3), None if missing else tf.ones(2), tf.ones(4)], list("abc")))
        return run()

    error = MismatchError if mode == "eager" else tf.errors.UnknownError
    # At first ranks have no agreed layout; different layouts would make them wait for each other.
    with pytest.raises(error, match=r"is 'b: .*' on rank 0 but 'b: .*' on rank"):
        reduce(odd)
    reducer = TensorReducer(f"different later {mode} {overlap}", groups=2, overlap=overlap)
    for _ in range(2):
        assert_close(reduce(False), [tf.ones(3), tf.ones(2), tf.ones(4)])
        if mode == "eager":  # the missing one counts as zeros, and its rank gets the result, too
            assert_close(reduce(odd), [tf.ones(3), tf.fill([2], (comm.size - 1) / comm.size), tf.ones(4)])
            continue
        with pytest.raises(error, match=rf"the gradient of b is None on ranks \[{comm.size - 1}\], but not on ranks"):
            reduce(odd)
    assert reduce(True)[1] is None


def test_wrong_arguments(comm: Any) -> None:
    for options, text in (
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=Average"),
        ({"gradient_predivide_factor": 0.0}, "positive"),
        ({"groups": [["a"], ["a"]]}, "only once in groups"),
        ({"groups": -1}, "groups"),
    ):
        with pytest.raises(UsageError, match=text):
            TensorReducer("wrong", **options)
    with pytest.raises(UsageError, match="2 gradients but 1"):
        TensorReducer("wrong")([None, None], ["a"])
    with pytest.raises(UsageError, match=r"the gradient of a: .*string"):
        TensorReducer("wrong")([tf.constant("text")], ["a"])
    with pytest.raises(UsageError, match="scale_local_gradients is 'no', expected True or False"):
        hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=cast("Any", "no"))
    with pytest.raises(UsageError, match="former name"):
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2, groups=2)


@pytest.mark.ranks(min=2)
@both
def test_bucket_size_limits(comm: Any, mode: str) -> None:
    """They match those of PyTorch's optimizer, and in a graph each bucket has its own node."""
    variables = [tf.Variable(tf.ones(256)) for _ in range(4)]

    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * (comm.rank + 1.0)) for variable in variables])
        tape = hvd.DistributedGradientTape(
            tape, overlap=True, bucket_cap_mib=2 / 1024, first_bucket_mib=1 / 1024, op=hvd.Sum
        )
        return tape.gradient(loss, variables), tape.reducer

    outcomes: list[Any] = []

    def step() -> Any:
        gradients, reducer = run()
        outcomes.append(reducer)
        return gradients

    results = in_mode(mode, step)()
    assert_close(results, [tf.fill([256], float(sum(range(1, comm.size + 1))))] * 4)
    (reducer,) = outcomes[0].reducers
    assert [len([p for p in bucket.parameters if p < 4]) for bucket in reducer.buckets] == [1, 2, 1]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.int32], ids=lambda d: d.name)
@both
def test_kept_results_of_any_dtype_do_not_change(comm: Any, mode: str, dtype: Any) -> None:
    reducer = TensorReducer(f"kept {mode} {dtype.name}", op=hvd.Sum)
    step = in_mode(mode, lambda x: reducer([x, x + x], ["x", "y"]))
    kept = [step(tf.cast(tf.fill([5000], number), dtype)) for number in range(6)]
    for number, (one, two) in enumerate(kept):
        check(one, tf.cast(tf.fill([5000], number * comm.size), dtype))
        check(two, tf.cast(tf.fill([5000], 2 * number * comm.size), dtype))


@pytest.mark.parametrize("compression", ["none", "bf16", "fp16", "int8"])
@both
def test_complex_numbers_of_any_shape_and_path(comm: Any, mode: str, compression: str) -> None:
    """Regression: a complex scalar was no pair, and compressed pairs were decoded as uncompressed ones."""
    reducer = TensorReducer(f"complex {mode} {compression}", compression=compression)
    kinds = [tf.constant(3 - 2j, dtype) * tf.ones(shape, dtype) for dtype in COMPLEX for shape in ((), (0,), (3, 1))]
    names = [str(number) for number in range(len(kinds))]
    mean = (comm.size + 1) / 2
    results = in_mode(mode, lambda *given: reducer(given, names))(*(one * (comm.rank + 1) for one in kinds))
    for one, expected in zip(results, kinds, strict=True):
        assert one.dtype == expected.dtype and one.shape == expected.shape
        np.testing.assert_allclose(one, expected * mean, rtol=2e-2 if compression == "int8" else 1e-6)
