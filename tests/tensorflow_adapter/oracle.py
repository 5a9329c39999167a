"""Oracle: compute the results in one process; helpers run functions eagerly and traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MODES = ["eager", "graph"]
ROWS = 4  # of a batch, per rank
FEATURES = 6


def in_mode(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` itself, or traced."""
    return function if mode == "eager" else tf.function(function)


def values(dtype: Any, rank: int, shape: tuple[int, ...] = (6, 2)) -> tf.Tensor:
    """Small whole numbers that differ between ranks and are exact in every dtype."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 5 + rank
    if dtype == tf.bool:
        return tf.constant(numbers % 2 == 1)
    if dtype.is_complex:
        return tf.constant(numbers + 1j * (numbers % 3), dtype)
    return tf.cast(tf.constant(numbers), dtype)


def everyone(comm: Any, dtype: Any, shape: tuple[int, ...] = (6, 2)) -> list[tf.Tensor]:
    """Return the result of `values` for each rank."""
    return [values(dtype, rank, shape) for rank in range(comm.size)]


def stacked(comm: Any, dtype: Any, shape: tuple[int, ...] = (6, 2)) -> Any:
    """The values of all ranks as one array of a dtype that numpy is exact in."""
    wide = np.complex128 if dtype.is_complex else np.int64
    return np.stack([tensor.numpy().astype(wide) for tensor in everyone(comm, dtype, shape)])


def check(got: Any, expected: Any) -> None:
    """Compare a tensor with a tensor or array: dtype, shape and every bit."""
    if isinstance(expected, tf.Tensor):
        assert got.dtype == expected.dtype
        expected = expected.numpy()
    assert tuple(got.shape) == tuple(np.shape(expected))
    np.testing.assert_array_equal(got.numpy(), np.asarray(expected).astype(got.numpy().dtype))


def assert_close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare (lists of) tensors or arrays; None only equals None."""
    if isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, tolerance)
    elif expected is None or got is None:
        assert got is expected
    else:
        dense = tf.convert_to_tensor(got).numpy()
        np.testing.assert_allclose(dense, tf.convert_to_tensor(expected).numpy(), rtol=tolerance, atol=tolerance)


def assert_same_everywhere(comm: Any, tensors: Sequence[Any]) -> None:
    """Check that every rank has the same bits."""
    bits = [np.asarray(tf.convert_to_tensor(tensor)).tobytes() for tensor in tensors]
    for other in comm.all_gather_object(bits):
        assert other == bits


def weights(seed: int = 0) -> list[tf.Variable]:
    """The variables of a small model, the same on every rank."""
    random = np.random.default_rng(seed)
    shapes = [(FEATURES, 8), (8,), (8, 3), (3,)]
    names = ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]
    return [tf.Variable(random.normal(size=s), name=n, dtype=tf.float64) for s, n in zip(shapes, names, strict=True)]


def batch(comm: Any, step: int = 0) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of all ranks: inputs and targets."""
    random = np.random.default_rng(1000 + step)
    rows = ROWS * comm.size
    return tf.constant(random.normal(size=(rows, FEATURES))), tf.constant(random.normal(size=(rows, 3)))


def mine(comm: Any, data: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """This rank's rows."""
    rows = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    return data[0][rows], data[1][rows]


def loss_of(variables: Sequence[Any], data: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    """The mean squared error of the model."""
    hidden = tf.tanh(data[0] @ variables[0] + variables[1])
    return tf.reduce_mean(tf.square(hidden @ variables[2] + variables[3] - data[1]))
