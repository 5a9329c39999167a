"""What is wrong is said on every rank, eagerly and in traced functions, and the next call works."""

from typing import Any

import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow._graph import graph_errors
from tests.tensorflow_adapter.oracle import MODES, check, in_mode

both = pytest.mark.parametrize("mode", MODES)


def expected(mode: str, error: type[Exception]) -> Any:
    """What a function raises: TensorFlow has errors of its own for what is raised while a graph runs."""
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
    with pytest.raises(Exception, match=r"bool.*scale"):
        in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0))(tf.constant([True]))


def test_other_errors_of_tensorflow_are_not_taken_for_ours(comm: Any) -> None:
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


def test_a_compiled_function_within_one_that_communicates(comm: Any) -> None:
    double = tf.function(lambda x: 2.0 * x, jit_compile=True)
    run = tf.function(lambda x: hvd.allreduce(double(x), op=hvd.Sum))
    check(run(tf.ones(2)), tf.ones(2) * 2.0 * comm.size)
