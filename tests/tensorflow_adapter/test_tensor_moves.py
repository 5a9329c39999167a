"""Moves of tensors compared with numpy: forwards, gradients, and second gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow.tensor import all_to_all, copy, gather, reduce, reduce_scatter, scatter
from tests.tensorflow_adapter.tensor_oracle import near, values

LENGTHS = (3, 0, 2, 5)
"""Of shards of uneven lengths, one of them empty."""


def cuts(comm: Any, lengths: Any) -> list[slice]:
    ends = np.cumsum([0, *lengths])
    return [slice(ends[rank], ends[rank + 1]) for rank in range(comm.size)]


def even(comm: Any, length: int) -> list[slice]:
    return cuts(comm, [len(one) for one in np.array_split(np.arange(length), comm.size)])


def of_ranks(comm: Any, *shape: int, seed: int) -> list[Any]:
    """Return the tensors of all ranks, which differ."""
    return [values(*shape, seed=100 * seed + rank) for rank in range(comm.size)]


def check(comm: Any, move: Any, inputs: list[Any], outputs: list[Any], backward: Any, how: str) -> None:
    """Compare a move, its gradient and its second gradient with the expected values of each rank."""
    cotangents = [values(*out.shape, seed=50 + rank) for rank, out in enumerate(outputs)]
    expected = backward(cotangents)
    x, wanted = tf.constant(inputs[comm.rank]), tf.constant(cotangents[comm.rank])

    def step(x: Any, wanted: Any) -> Any:
        with tf.GradientTape() as second:
            second.watch(wanted)
            with tf.GradientTape() as first:
                first.watch(x)
                out = move(x)
                total = tf.reduce_sum(out * wanted)
            gradient = first.gradient(total, x)
            further = tf.reduce_sum(gradient * x)
        return out, gradient, second.gradient(further, wanted)

    if how == "eager":
        run = step
    else:
        known = [tf.TensorSpec(None if how == "unknown" else [None] * one.shape.rank, one.dtype) for one in (x, wanted)]
        run = tf.function(step, input_signature=None if how == "traced" else known, autograph=False)
    got = run(x, wanted)
    near(got[0], outputs[comm.rank], what="forward")
    near(got[1], expected[comm.rank], what="gradient")
    # The move is linear: the gradient's gradient is the move itself.
    near(got[2], outputs[comm.rank], what="second")


HOW = pytest.mark.parametrize("how", ["eager", "traced", "dynamic"])


@HOW
def test_copy_and_reduce(comm: Any, how: str) -> None:
    same = [values(3, 4)] * comm.size
    check(comm, lambda x: copy(x, comm), same, same, lambda out: [sum(out)] * comm.size, how)
    several = of_ranks(comm, 3, 4, seed=1)
    check(comm, lambda x: reduce(x, comm), several, [sum(several)] * comm.size, lambda out: out, how)


@HOW
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter(comm: Any, dim: int, how: str) -> None:
    whole = values(5, 6, 7)
    parts = np.array_split(whole, comm.size, dim)

    def backward(out: Any) -> Any:
        return [np.concatenate(out, dim)] * comm.size

    check(comm, lambda x: scatter(x, comm, dim), [whole] * comm.size, parts, backward, how)


@HOW
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("partial", [False, True])
def test_gather(comm: Any, partial: bool, dim: int, how: str) -> None:
    places = cuts(comm, LENGTHS[: comm.size])
    whole = np.moveaxis(values(places[-1].stop, 4, 2), 0, dim)
    parts = [np.moveaxis(np.moveaxis(whole, dim, 0)[place], 0, dim) for place in places]

    def backward(out: Any) -> Any:
        total = [sum(out)] * comm.size if partial else out
        return [np.moveaxis(np.moveaxis(one, dim, 0)[place], 0, dim) for one, place in zip(total, places, strict=True)]

    check(comm, lambda x: gather(x, comm, dim, partial=partial), parts, [whole] * comm.size, backward, how)


@HOW
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter(comm: Any, dim: int, how: str) -> None:
    several = of_ranks(comm, 5, 6, 7, seed=2)
    parts = np.array_split(sum(several), comm.size, dim)

    def backward(out: Any) -> Any:
        return [np.concatenate(out, dim)] * comm.size

    check(comm, lambda x: reduce_scatter(x, comm, dim), several, parts, backward, how)


@HOW
@pytest.mark.parametrize(("divide", "join"), [(1, 0), (0, 2), (-1, 1)])
def test_all_to_all(comm: Any, divide: int, join: int, how: str) -> None:
    divide_at, join_at = divide % 3, join % 3
    whole = np.moveaxis(values(sum(LENGTHS[: comm.size]), 5, 6), 0, join_at)
    joined = cuts(comm, LENGTHS[: comm.size])

    def parts(x: Any, at: int, places: list[slice]) -> list[Any]:
        return [x[(slice(None),) * at + (place,)] for place in places]

    inputs = parts(whole, join_at, joined)
    outputs = parts(whole, divide_at, even(comm, whole.shape[divide_at]))

    def backward(out: Any) -> Any:
        return parts(np.concatenate(out, divide_at), join_at, joined)

    check(comm, lambda x: all_to_all(x, comm, divide, join), inputs, outputs, backward, how)


def test_unknown_shapes(comm: Any) -> None:
    several = of_ranks(comm, 3, 4, seed=3)
    check(comm, lambda x: reduce(x, comm), several, [sum(several)] * comm.size, lambda out: out, "unknown")
    parts = np.array_split(sum(several), comm.size, 1)
    whole = [np.concatenate(several, 1)] * comm.size

    def joined(out: Any) -> Any:
        return [np.concatenate(out, 1)] * comm.size

    check(comm, lambda x: reduce_scatter(x, comm, 1), several, parts, joined, "unknown")
    check(
        comm,
        lambda x: gather(x, comm, 1),
        several,
        whole,
        lambda out: np.split(out[comm.rank], comm.size, 1),
        "unknown",
    )


def test_known_dimensions_are_propagated(comm: Any) -> None:
    @tf.function
    def shapes(x: Any) -> Any:
        assert scatter(x, comm, 0).shape[1:] == [6]
        assert scatter(x, comm, 1).shape[1] == np.array_split(np.arange(6), comm.size)[comm.rank].size
        assert gather(x, comm, 1).shape.rank == 2
        assert reduce(x, comm).shape[1] == 6
        return x

    shapes.get_concrete_function(tf.TensorSpec([None, 6], tf.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_dtypes(comm: Any, dtype: str) -> None:
    x = tf.cast(tf.fill([2, 3], comm.rank % 2), dtype)
    whole = gather(x, comm, 0)
    assert whole.dtype == dtype
    near(tf.cast(whole, "float32"), np.repeat(np.arange(comm.size) % 2, 2)[:, None] * np.ones(3))


@pytest.mark.ranks(min=2)
def test_invalid_arguments_are_refused(comm: Any) -> None:
    x = tf.constant(values(3, 4))
    for move in (scatter, gather, reduce_scatter):
        with pytest.raises(UsageError, match="no dimension 2"):
            move(x, comm, 2)
    with pytest.raises(UsageError, match="both split and joined"):
        all_to_all(x, comm, 1, -1)
    with pytest.raises(UsageError, match="expected a Communicator such as"):
        copy(x, "tp")  # type: ignore[arg-type]


@pytest.mark.ranks(min=2)
def test_graphs_without_control_dependencies_are_refused(comm: Any) -> None:
    with tf.Graph().as_default(), pytest.raises(UsageError, match="nothing orders the nodes"):
        reduce(tf.constant(1.0), comm)
