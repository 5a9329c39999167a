"""Errors reach every rank, eagerly and in traced functions, and the next call works."""

import pickle
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, TransportError, UsageError
from commlib.process.tracebacks import entered_call
from commlib_tensorflow import errors
from commlib_tensorflow._host_calls import Spec, call, graph_errors, no_autograph
from tests.tensorflow_adapter.oracle import MODES, check, in_mode

both = pytest.mark.parametrize("mode", MODES)


def expected(mode: str, error: type[Exception]) -> Any:
    """Return the class of an error: TensorFlow replaces those raised while a graph runs by its own."""
    if mode == "eager":
        return error
    return tf.errors.InvalidArgumentError if issubclass(error, ValueError) else tf.errors.UnknownError


@both
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "verb"])
def test_mismatches(comm: Any, what: str, mode: str) -> None:
    odd = comm.rank == comm.size - 1

    def call(x: Any) -> Any:
        if what == "shape":
            return hvd.allreduce(tf.ones([3 if odd else 2]), name=what)
        if what == "dtype":
            return hvd.allreduce(tf.ones(2, tf.bfloat16 if odd else tf.float32), name=what)
        if what == "op":
            return hvd.allreduce(tf.ones(2), op=hvd.Sum if odd else hvd.Max, name=what)
        if what == "root":
            return hvd.broadcast(tf.ones(2), int(odd), name=what)
        return hvd.allgather(tf.ones(2), name=what) if odd else hvd.allreduce(tf.ones(2), name=what)

    with pytest.raises(expected(mode, MismatchError), match=rf"{what} is .* on ranks? 0.* but .* on rank") as caught:
        in_mode(mode, call)(tf.ones(2))
    if mode == "graph":
        assert isinstance(graph_errors.original(caught.value), hvd.HorovodInternalError)
    check(in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, name=what))(tf.ones(2)), tf.ones(2) * comm.size)


@both
def test_usage_errors(comm: Any, mode: str) -> None:
    run = in_mode(mode, lambda x: hvd.alltoall(x, tf.constant([5] * comm.size)))
    with pytest.raises(expected(mode, UsageError), match="splits"):
        run(tf.ones(2))
    run = in_mode(mode, lambda x: hvd.broadcast(x, comm.size))
    with pytest.raises(expected(mode, UsageError), match="root_rank"):
        run(tf.ones(2))
    with pytest.raises(expected(mode, UsageError), match=r"got 'fp16': pass Compression.fp16"):
        in_mode(mode, lambda x: hvd.allreduce(x, compression="fp16"))(tf.ones(2))  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"bool.*scale"):
        in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0))(tf.constant([True]))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (hvd.grouped_allreduce, "grouped_allreduce: expected a list of tensors"),
        (hvd.grouped_allgather, "grouped_allgather: expected a list of tensors"),
        (hvd.grouped_reducescatter, "grouped_reducescatter: expected a list of tensors"),
        (lambda other: hvd.broadcast_(other, 0), "broadcast_: expected a list of variables"),
        (lambda other: hvd.broadcast_variables(other, 0), "broadcast_variables: expected variables, such as"),
        (lambda other: hvd.clip_by_global_norm(other, 1.0), "clip_by_global_norm: expected a list of gradients"),
        (lambda other: hvd.init(process_sets=other), 'init: expected process_sets="dynamic", or a list of ProcessSet'),
    ],
)
def test_arguments_of_other_types_are_refused(comm: Any, call: Any, text: str) -> None:
    """Regression: they raised a TypeError from within."""
    for other, got in ((3, "int 3"), (object(), "object")):
        with pytest.raises(UsageError, match=f"{text}.*, got {got}"):
            call(other)


def test_other_errors_of_tensorflow_are_not_converted(comm: Any) -> None:
    with pytest.raises(UsageError) as ours:
        hvd.broadcast(tf.ones(2), comm.size)
    with pytest.raises(tf.errors.InvalidArgumentError) as theirs:
        tf.ones([2, 2]) @ tf.ones([3, 3])
    assert graph_errors.original(theirs.value) is None
    assert graph_errors.original(ours.value) is None


@pytest.mark.parametrize("nested", [False, True])
def test_xla_is_refused(comm: Any, nested: bool) -> None:
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x)

    compiled = tf.function(tf.function(reduce) if nested else reduce, jit_compile=True)
    with pytest.raises(Exception, match=r"jit_compile=False"):
        compiled(tf.ones(2))


def test_a_compiled_function_inside_one_that_communicates(comm: Any) -> None:
    double = tf.function(lambda x: 2.0 * x, jit_compile=True)
    run = tf.function(lambda x: hvd.allreduce(double(x), op=hvd.Sum))
    check(run(tf.ones(2)), tf.ones(2) * 2.0 * comm.size)


# Classes by which errors can be caught

KINDS = {
    UsageError: [tf.errors.InvalidArgumentError, ValueError],
    MismatchError: [tf.errors.FailedPreconditionError, tf.errors.UnknownError],
    ShutdownError: [tf.errors.FailedPreconditionError, tf.errors.UnknownError],
    StallError: [tf.errors.DeadlineExceededError, tf.errors.UnknownError, TimeoutError],
    PeerError: [tf.errors.UnknownError],
    TransportError: [tf.errors.UnknownError],
}


def failing(error: Exception) -> Any:
    """An operation that raises an error."""

    def host(array: Any) -> Any:
        raise error

    return no_autograph(lambda x: call(host, [x], [Spec.like(x)])[0])


@pytest.mark.parametrize("where", ["eager", "graph", "nested", "session", "dataset"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_errors_belong_to_commlib_and_tensorflow(comm: Any, kind: type[CommlibError], where: str) -> None:
    """Regression: they were only TensorFlow's in graphs, and only commlib's eagerly: no `except` caught both."""
    fail = failing(kind(f"a text of {kind.__name__} {where}"))
    with pytest.raises(hvd.HorovodInternalError, match=f"a text of {kind.__name__} {where}") as caught:
        if where == "eager":
            fail(tf.ones(2))
        elif where == "graph":
            tf.function(fail)(tf.ones(2))
        elif where == "nested":
            tf.function(lambda x: tf.function(fail)(x) + 1.0)(tf.ones(2))
        elif where == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                session.run(fail(tf.ones(2)))
        else:
            list(tf.data.Dataset.from_tensors(tf.ones(2)).map(fail))
    for base in [kind, *KINDS[kind]]:
        assert isinstance(caught.value, base)
    assert isinstance(caught.value, tf.errors.OpError)
    assert caught.value.error_code == getattr(errors, kind.__name__).code
    copy = pickle.loads(pickle.dumps(caught.value)) if caught.value.op is None else caught.value
    assert type(copy) is type(caught.value) and str(copy) == str(caught.value)


def test_other_errors_are_not_changed(comm: Any) -> None:
    with pytest.raises(MismatchError):
        tf.function(failing(MismatchError("of ours")))(tf.ones(2))

    def other(array: Any) -> Any:
        raise RuntimeError("not of ours")  # although its text contains this one

    with pytest.raises(tf.errors.UnknownError, match="not of ours") as theirs:
        tf.function(lambda x: tf.numpy_function(other, [x], tf.float32))(tf.ones(2))
    assert type(theirs.value) is tf.errors.UnknownError
    with pytest.raises(tf.errors.InvalidArgumentError) as theirs:
        tf.ones([2, 2]) @ tf.ones([3, 3])
    assert type(theirs.value) is tf.errors.InvalidArgumentError
    assert str(tf.errors.UnknownError(None, None, "text")) == "text"
    assert type(tf.errors.InvalidArgumentError(None, None, "text", {})) is tf.errors.InvalidArgumentError


def test_an_error_while_a_function_is_traced(comm: Any) -> None:
    @tf.function
    def run(x: Any) -> Any:
        return hvd.allreduce(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="dtype string") as caught:
        run(tf.constant("text"))
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("where", ["eager", "traced", "in a node"])
def test_an_error_is_told_once_and_names_the_call(comm: Any, where: str) -> None:
    """Regression: texts from traced functions had all frames, the message twice, and a wrapper's name for the call."""
    x, splits = (tf.ones(2), [5] * comm.size) if where == "in a node" else (tf.constant("text"), None)

    def run() -> Any:
        return hvd.alltoall(x, splits)

    with pytest.raises(UsageError) as caught:
        (run if where == "eager" else tf.function(run))()
    text = str(caught.value)
    assert text.count("splits must" if where == "in a node" else "dtype string") <= 1
    assert "Traceback" not in text and "guarded" not in text and "_host_calls.py" not in text
    assert (entered_call(caught.value.__traceback__) or caught.value.entered) == "alltoall"
    if where != "eager":
        assert "frames inside commlib; COMMLIB_TRACEBACK=full shows them" in text and "in run" in text


def _model() -> Any:
    return keras.Sequential([keras.Input([2]), *(keras.layers.Dense(2) for _ in range(4))])


def _pipeline(comm: Any, **options: Any) -> Any:
    return hvd.pipeline(_model(), comm, microbatches=1, **options)


@pytest.mark.parametrize(
    ("expected", "call"),
    [
        (r"^\S+: all_reduce, rank \d: tensors of dtype string", lambda comm: hvd.all_reduce("x", ranks=comm)),
        (r"^\S+: all_gather, rank \d: tensors of dtype string", lambda comm: hvd.all_gather_async("x", ranks=comm)),
        (r"^\S+: broadcast, rank \d: tensors of dtype string", lambda comm: hvd.broadcast("x", 0, ranks=comm)),
        (r"^\S+: scan, rank \d: expected a tensor, got object", lambda comm: hvd.scan(object(), ranks=comm)),
        ("^allreduce: expected a tensor, got NoneType", lambda comm: hvd.allreduce(None)),
        ("^allgather: tensors of dtype string", lambda comm: hvd.allgather("x")),
        ("^broadcast: tensors of dtype string", lambda comm: hvd.broadcast("x", 0)),
        ("^alltoall: expected a tensor, got dict", lambda comm: hvd.alltoall({"x": 1})),
        ("^reducescatter: tensors of dtype string", lambda comm: hvd.reducescatter("x")),
        ("^copy: tensors of dtype string", lambda comm: hvd.tensor.copy("x", comm)),
        ("^gather: expected a tensor, got NoneType", lambda comm: hvd.tensor.gather(None, comm)),
        ("^all_to_all: tensors of dtype string", lambda comm: hvd.tensor.all_to_all("x", comm, 0, 0)),
        ("^vocabulary_cross_entropy: tensors", lambda comm: hvd.vocabulary_cross_entropy("x", [1], comm)),
        ("^parallelize: verify is 3, expected a batch", lambda comm: hvd.parallelize(_model(), comm, {}, verify=3)),
        ("^expertize: example is 'x', expected a batch", lambda comm: hvd.expertize(_model(), comm, {}, example="x")),
        ("^pipeline: schedule is 3, expected a name", lambda comm: _pipeline(comm, schedule=3)),
        ("^pipeline: rows is 3, expected a dict", lambda comm: _pipeline(comm, rows=3)),
        ("^pipeline: split is 3, expected 'auto'", lambda comm: _pipeline(comm, split=3)),
        ("^pipeline: optimizer is 3, expected one of Keras 3", lambda comm: _pipeline(comm, optimizer=3)),
        ("^gather_weights: expected a keras.Model, got builtins.int", lambda comm: hvd.gather_weights(3)),
        ("^set_weights: expected a keras.Model, got builtins.int", lambda comm: hvd.tensor.set_weights(3, [])),
        ("^set_weights: expected a list .* got NoneType", lambda comm: hvd.tensor.set_weights(_model(), None)),  # type: ignore[arg-type]
        ("^expert_stats: expected a keras.Model, got builtins.int", lambda comm: hvd.expert_stats(3)),
        ("^DistributedGradientTape: expected .* got int", lambda comm: hvd.DistributedGradientTape(3)),
        ("got the class GradientTape", lambda comm: hvd.DistributedGradientTape(tf.GradientTape)),
        ("^DistributedGradientTape: expected .* got str", lambda comm: hvd.PartialDistributedGradientTape("tape")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_of_another_type(comm: Any, expected: str, call: Any) -> None:
    """Regression: such errors did not name the call, were none of ours, or came later."""
    with pytest.raises(UsageError, match=expected):
        call(comm)


@pytest.mark.ranks(min=2)
def test_a_step_of_keras_that_fails(comm: Any) -> None:
    """Catching HorovodInternalError around `fit` catches it."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1 + comm.rank)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(), name="fails"), "mse")
    try:
        model.fit(np.ones([2, 2]), np.ones([2, 1 + comm.rank]), verbose=0)
    except hvd.HorovodInternalError as error:
        caught: Any = error
    assert isinstance(caught, MismatchError) and isinstance(caught, tf.errors.FailedPreconditionError)
    check(hvd.allreduce(tf.ones(2), op=hvd.Sum), tf.ones(2) * comm.size)


def test_before_init(comm: Any) -> None:
    program = """
import tensorflow as tf
import commlib_tensorflow as hvd
for function in (hvd.rank_op, tf.function(lambda: hvd.rank_op())):
    try:
        function()
    except tf.errors.FailedPreconditionError as error:
        assert isinstance(error, ValueError) and isinstance(error, hvd.HorovodInternalError), type(error)
        print("caught")
"""
    if comm.rank == 0:  # as on every rank: it is alone
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.stdout == "caught\ncaught\n", done.stderr
