"""Gradients of the ordered verbs: first and second ones match one process with the data of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.errors import MismatchError, UsageError
from tests.bodies import verb_gradients
from tests.bodies.verb_gradients import CASES, Array, Case


def zeros(shape: tuple[int, ...]) -> Any:
    return tf.zeros(shape, tf.float64)


def gradients(run: Callable[[Any], Any], x: Any, weights: Any) -> tuple[Any, Any, Any]:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            result = run(x)
            loss = tf.reduce_sum(weights * tf.square(result))
        gradient = inner.gradient(loss, x)
        squares = tf.reduce_sum(tf.square(gradient))
    return result, gradient, outer.gradient(squares, x)


def eagerly(run: Callable[[Any], Any], x: Any, weights: Any) -> tuple[Any, Any, Any]:
    return gradients(run, x, weights)


def tapes_inside(run: Callable[[Any], Any], x: Any, weights: Any) -> tuple[Any, Any, Any]:
    return tf.function(lambda x: gradients(run, x, weights))(x)  # type: ignore[no-any-return]


def tapes_outside(run: Callable[[Any], Any], x: Any, weights: Any) -> tuple[Any, Any, Any]:
    return gradients(tf.function(run), x, weights)


def unknown_shapes(run: Callable[[Any], Any], x: Any, weights: Any) -> tuple[Any, Any, Any]:
    traced = tf.function(run, input_signature=[tf.TensorSpec([None] * len(x.shape), x.dtype)])
    return gradients(traced, x, weights)


def forward_over_reverse(run: Callable[[Any], Any], x: Any, weights: Any) -> tuple[Any, Any, Any]:
    """The gradient of the squares of a gradient is twice its derivative in its own direction: the loss is quadratic."""

    def gradient() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = run(x)
            loss = tf.reduce_sum(weights * tf.square(result))
        return result, tape.gradient(loss, x)

    direction = gradient()[1]
    with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
        result, found = gradient()
    return result, found, 2 * accumulator.jvp(found)


FORMS = [eagerly, tapes_inside, tapes_outside, unknown_shapes, forward_over_reverse]


def differentiate(case: Case, comm: Any, form: Any, x: Array, weights: Array) -> tuple[Any, ...]:
    result = form(lambda x: case.call(ct, x, comm, zeros), tf.constant(x), tf.constant(weights))
    return tuple(one.numpy() for one in result)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_one_process(comm: Any, name: str, form: Any) -> None:
    case = CASES[name]
    verb_gradients.check(case, comm, lambda x, weights: differentiate(case, comm, form, x, weights))


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(comm: Any, name: str) -> None:
    """A verb is linear, so its derivative in the direction of the input is the result."""
    case = CASES[name]
    x = tf.constant(verb_gradients.expected(case, comm.rank, comm.size).x)
    with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
        result = case.call(ct, x, comm, zeros)
    np.testing.assert_allclose(accumulator.jvp(result).numpy(), result.numpy(), rtol=1e-12, atol=1e-12)


def test_second_order_on_ranks_without_a_use_for_the_result(comm: Any) -> None:
    """The gradient of a term that keeps a rank in a second backward depends on the result."""
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            result = ct.all_reduce(x * x, ranks=comm)
            loss = tf.reduce_sum(result**3) if comm.rank == 0 else 0 * tf.reduce_sum(result**2)
        gradient = inner.gradient(loss, x)
        squares = tf.reduce_sum(tf.square(gradient))
    second = outer.gradient(squares, x)
    size = comm.size
    np.testing.assert_allclose(gradient.numpy(), 6 * size**2 * x.numpy() ** 5)
    np.testing.assert_allclose(second.numpy(), 72 * size**4 * x.numpy() ** 9 + 288 * size**4 * x.numpy() ** 9)


def test_forward_mode_through_several_verbs(comm: Any) -> None:
    x = tf.constant(np.random.default_rng(comm.rank).standard_normal((2, 2)))
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        loss = model(x, comm)
    step = 1e-4
    slope = (model(x + step, comm) - model(x - step, comm)) / (2 * step)
    np.testing.assert_allclose(accumulator.jvp(loss).numpy(), slope.numpy(), rtol=1e-6)


@pytest.mark.ranks(min=2)
def test_forward_mode_keeps_the_numbers_of_calls(comm: Any) -> None:
    """Ranks whose backwards come in different orders must not exchange the gradients of two calls."""
    group = comm.split(0)
    x = tf.ones(3)
    with tf.autodiff.ForwardAccumulator(x, x), tf.GradientTape() as tape:
        tape.watch(x)
        one, two = ct.all_reduce(x, ranks=group), ct.all_reduce(tf.sin(x), ranks=group)
        last = two if comm.rank == 0 else one
    with pytest.raises(MismatchError, match="of gradients, call"):
        tape.gradient(last, x)


@pytest.mark.parametrize("verb", [ct.all_reduce, ct.all_gather, ct.allreduce, ct.allgather], ids=lambda v: v.__name__)
def test_forward_mode_in_a_traced_function_is_refused(verb: Any) -> None:
    """TensorFlow would give zeros."""

    @tf.function
    def run(x: Any, call: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = verb(call(x * x))
        return y, accumulator.jvp(y)

    with pytest.raises(UsageError, match=r"ForwardAccumulator.*call the function eagerly.*two tf\.GradientTape"):
        run(tf.ones(2), lambda x: x)
    run(tf.ones(2), tf.stop_gradient)


def test_forward_mode_around_a_traced_function_is_refused(comm: Any) -> None:
    x = tf.ones(2)
    with tf.autodiff.ForwardAccumulator(x, x), pytest.raises(UsageError, match=r"for forward mode .*call .* eagerly"):
        tf.function(lambda x: ct.all_reduce(x, ranks=comm))(x)


def test_jacobian(comm: Any) -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = ct.all_reduce(x * x, ranks=comm)
    with pytest.raises(Exception, match=r"pass experimental_use_pfor=False to tape\.jacobian"):
        tape.jacobian(y, x)
    found = tape.jacobian(y, x, experimental_use_pfor=False)
    np.testing.assert_allclose(found.numpy(), 2 * comm.size * np.diag(x.numpy()))


def model(x: Any, comm: Any) -> Any:
    """A function of several verbs, in which the result of each feeds another."""
    y = ct.all_gather(tf.sin(x), ranks=comm)
    z = ct.reduce_scatter(tf.square(y) * (comm.rank + 1.0), ranks=comm)
    mean = ct.all_reduce(tf.reduce_mean(z), "mean", ranks=comm)
    shared = ct.broadcast(tf.cos(z) * mean, root=comm.size - 1, ranks=comm)
    return tf.reduce_sum(ct.scan(shared * x, ranks=comm) * z)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_finite_differences_across_ranks(comm: Any, traced: bool) -> None:
    x = np.random.default_rng(comm.rank).standard_normal((2, 2))
    run = tf.function(lambda x: model(x, comm)) if traced else lambda x: model(x, comm)
    variable = tf.Variable(x)
    with tf.GradientTape() as tape:
        loss = run(variable * 1.0)
    slopes = verb_gradients.slopes(comm, lambda x: float(run(tf.constant(x))), x)
    np.testing.assert_allclose(tape.gradient(loss, variable).numpy(), slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32], ids=lambda dtype: dtype.name)
def test_other_dtypes(comm: Any, dtype: Any) -> None:
    x = tf.Variable(tf.cast([1.0, 2.0], dtype))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(ct.all_reduce(x, "mean", ranks=comm) * tf.cast(comm.rank + 1, dtype))
    gradient = tape.gradient(y, x)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(tf.cast(gradient, tf.float64).numpy(), [(comm.size + 1) / 2] * 2)


def test_gradients_of_some_rows(comm: Any) -> None:
    """TensorFlow's gradient of a gather is tf.IndexedSlices."""
    x = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.gather(ct.all_gather(x, ranks=comm), [comm.size - 1]))
    np.testing.assert_array_equal(
        tf.convert_to_tensor(tape.gradient(y, x)).numpy(), [[comm.size * (comm.rank == comm.size - 1)] * 2]
    )


REFUSED = {
    "reduce": (lambda x, comm: ct.reduce(x, ranks=comm), "call all_reduce"),
    "gather": (lambda x, comm: ct.gather(x, ranks=comm), "call all_gather"),
    "exscan": (lambda x, comm: ct.exscan(x, ranks=comm), "call scan, and subtract"),
    "send": (lambda x, comm: ct.send(x, comm.rank, ranks=comm), "call send_recv"),
    "all_reduce max": (lambda x, comm: ct.all_reduce(x, "max", ranks=comm), "only sum and mean have one"),
    "reduce_scatter prod": (lambda x, comm: ct.reduce_scatter(x, "prod", ranks=comm), "only sum and mean have one"),
    "scan min": (lambda x, comm: ct.scan(x, "min", ranks=comm), "only sum has one"),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", REFUSED)
def test_verbs_without_a_backward_are_refused_before_anything_is_sent(comm: Any, name: str, traced: bool) -> None:
    verb, text = REFUSED[name]

    def call(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with pytest.raises(UsageError, match=rf"rank {comm.rank}: .*{text}.*pass tf.stop_gradient\(tensor\)"):
                verb(x * 2.0, comm)
            if name != "send":
                verb(tf.stop_gradient(x * 2.0), comm)
        return x

    (tf.function(call) if traced else call)(tf.ones(comm.size))


@pytest.mark.parametrize("name", REFUSED)
def test_verbs_without_a_backward_are_refused_in_forward_mode(comm: Any, name: str) -> None:
    verb, text = REFUSED[name]
    x = tf.ones(comm.size)
    with tf.autodiff.ForwardAccumulator(x, x), pytest.raises(UsageError, match=text):
        verb(x * 2.0, comm)


@pytest.mark.ranks(min=2)
def test_a_verb_without_a_backward_in_a_traced_function_with_a_tape_outside(comm: Any) -> None:
    for run, ranks in (
        (lambda x: ct.all_reduce(x, "max", ranks=comm), range(comm.size)),
        (lambda x: ct.reduce(x, ranks=comm), [0]),
        (lambda x: ct.exscan(x, ranks=comm), range(1, comm.size)),
    ):
        x = tf.ones(2)
        traced = tf.function(run)
        with tf.GradientTape() as tape:
            tape.watch(x)
            if comm.rank in ranks:
                with pytest.raises(UsageError, match=r"no gradient flows through|requires a gradient"):
                    traced(x)
        if comm.rank in ranks:
            traced(x)  # the ranks without a result run it, as they have no gradient to refuse
        else:
            with tf.GradientTape() as tape:
                tape.watch(x)
                assert traced(x) is None


def test_asynchronous_verbs_are_refused(comm: Any) -> None:
    x = tf.Variable(tf.ones(comm.size))
    with tf.GradientTape() as tape:
        for start in (ct.all_reduce_async, ct.all_gather_async, ct.scan_async, ct.broadcast_async):
            with pytest.raises(UsageError, match=r"_async, rank \d: the tensor requires a gradient.*tf.stop_gradient"):
                start(x, ranks=comm)
        with tape.stop_recording():
            assert ct.all_reduce_async(x, ranks=comm).wait().numpy().tolist() == [comm.size] * comm.size
        assert ct.all_reduce_async(tf.stop_gradient(x), ranks=comm).wait().shape == x.shape
        assert ct.all_reduce_async(tf.ones(2), ranks=comm).wait().shape == (2,)
    assert ct.all_reduce_async(x, ranks=comm).wait().shape == x.shape


@pytest.mark.ranks(min=2)
def test_a_gradient_on_some_ranks_only(comm: Any) -> None:
    """A backward would wait for ranks that run none, or match it with another of their calls."""
    group = comm.split(0)
    x = tf.ones(3)
    with tf.GradientTape() as tape:
        if comm.rank == 0:
            tape.watch(x)
        with pytest.raises(MismatchError, match="all_reduce of 3 x float32, op=sum, algorithm=auto, with gradient"):
            ct.all_reduce(x, ranks=group)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_backward_on_some_ranks_only(comm: Any, traced: bool) -> None:
    group = comm.split(0)
    run = tf.function(lambda x: ct.all_reduce(x, ranks=group)) if traced else lambda x: ct.all_reduce(x, ranks=group)
    x = tf.Variable(tf.ones(3))
    with tf.GradientTape() as tape:
        y = run(x * 1.0)
    with pytest.raises(MismatchError, match="of gradients"):
        if comm.rank == 0:
            tape.gradient(y, x)
        else:
            ct.all_reduce(tf.ones(3), ranks=group)


def test_a_keras_model_trains_through_a_verb(comm: Any) -> None:
    """fit traces the step: the loss covers all ranks' rows, as in one process."""

    class Shared(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return ct.all_reduce(x, "mean", ranks=comm)

    def trained(layers: list[Any], x: Any, y: Any) -> Any:
        model = tf.keras.Sequential([tf.keras.Input((2,)), *layers])
        model.layers[0].set_weights([np.ones((2, 1), np.float32), np.zeros(1, np.float32)])
        model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse")
        model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
        return model.layers[0].get_weights()[0]

    rows = np.arange(8, dtype=np.float32).reshape(4, 2) / 10
    expected = trained([tf.keras.layers.Dense(1)], rows, rows.sum(1, keepdims=True) * 2)
    # All ranks have the same rows: the mean is that of one rank, and so is its gradient.
    got = trained([tf.keras.layers.Dense(1), Shared()], rows, rows.sum(1, keepdims=True) * 2)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("verb", ["all_reduce", "send_recv"])
def test_backwards_run_in_the_same_order_whatever_a_loss_looks_like(comm: Any, verb: str, traced: bool) -> None:
    """Two verbs of the same signature: a tape would run their backwards in an order that follows from the loss."""
    rank, size = comm.rank, comm.size
    values = tf.constant([[1.0 + each, 2.0] for each in range(size)], tf.float64)

    def exchange(x: Any) -> Any:
        if verb == "all_reduce":
            return ct.all_reduce(x, ranks=comm)
        return ct.send_recv(x, (rank + 1) % size, x, (rank - 1) % size, ranks=comm)

    def loss_of(first: Any, second: Any, other_order: bool) -> Any:
        total = tf.reduce_sum(second * first) if other_order else tf.reduce_sum(first * second)
        nested = tf.sin(tf.sin(second if other_order else first))
        return total + tf.reduce_sum(nested)

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(exchange(x * x), exchange(tf.sin(x)), rank % 2 == 1)
        return tape.gradient(loss, x)

    with tf.GradientTape() as tape:  # one process
        tape.watch(values)
        total = 0.0
        for each in range(size):
            if verb == "all_reduce":
                first, second = tf.reduce_sum(values**2, 0), tf.reduce_sum(tf.sin(values), 0)
            else:
                first, second = values[(each - 1) % size] ** 2, tf.sin(values[(each - 1) % size])
            total += loss_of(first, second, each % 2 == 1)
    expected = tape.gradient(total, values)[rank]
    run = tf.function(gradient) if traced else gradient
    for _ in range(3):
        np.testing.assert_allclose(run(values[rank]), expected, rtol=0, atol=1e-10)


def test_help_states_the_gradients() -> None:
    assert "the gradient on the root is the sum instead" in str(ct.broadcast.__doc__)
    text, arguments = str(ct.all_to_all_v.__doc__).split("Args:")
    assert "Differentiates: the gradients of the rows" in text
    assert "Differentiates" not in arguments
