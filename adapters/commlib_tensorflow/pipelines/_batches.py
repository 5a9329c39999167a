"""Batches: cut a user's data into microbatches, and shuffle arrays in the same order on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.pipeline.batch import NONE, rows_of, sort_by_key
from commlib.pipeline.batch import digest as digest_of
from commlib.pipeline.rows import WHOLE, check_result, each, number_of_rows, pad_microbatches
from commlib_tensorflow._bridge import to_array


def inputs_of(graph: Any, x: Any) -> list[tf.Tensor]:
    """Return a batch as the input tensors of a functional model, in the model's order and dtypes.

    Raises UsageError if there are too few or too many of them.
    """
    specs = graph.inputs
    names = [spec.name for spec in specs]
    if isinstance(x, dict):
        keys = keras.tree.flatten(graph.input) and (list(graph.input) if isinstance(graph.input, dict) else names)
        missing = [key for key in keys if key not in x]
        if missing:
            raise UsageError(f"pipeline: x has no {missing[0]!r}; the model's inputs are {', '.join(map(str, keys))}")
        ordered = keras.tree.flatten({key: x[key] for key in keys}) if isinstance(graph.input, dict) else None
        flat = ordered if ordered is not None else [x[key] for key in keys]
    else:
        flat = keras.tree.flatten(x)
    if len(flat) != len(specs):
        hint = f"; {_OF_NUMBERS}" if any(isinstance(leaf, int | float) for leaf in flat) else ""
        raise UsageError(
            f"pipeline: x has {len(flat)} tensors; the model has {len(specs)} inputs: {', '.join(names)}{hint}"
        )
    return [_fit_to_spec(value, spec) for value, spec in zip(flat, specs, strict=True)]


def _fit_to_spec(value: Any, spec: Any) -> tf.Tensor:
    """Return a value with an input's dtype; add or remove a last dimension of 1 where the input needs it."""
    tensor = _tensor(value, f"x: input {spec.name!r}")
    if tensor.dtype != tf.as_dtype(spec.dtype):
        tensor = tf.cast(tensor, spec.dtype)
    rank, expected = len(tensor.shape), len(spec.shape)
    if rank == expected - 1 and spec.shape[-1] == 1:
        return tf.expand_dims(tensor, -1)
    if rank == expected + 1 and tensor.shape[-1] == 1:
        return tf.squeeze(tensor, -1)
    if rank != expected:
        raise UsageError(f"pipeline: x has shape {tuple(tensor.shape)} where input {spec.name!r} has {spec.shape}")
    return tensor


def places_of(graph: Any, x: Any, where: Any) -> list[Any]:
    """Return the row dimension of each model input, given x and the row dimensions of x: see `Rows`."""
    specs = graph.inputs
    if isinstance(where, dict) and isinstance(x, dict):
        if unknown := [name for name in where if name not in x]:
            raise UsageError(f"pipeline: rows names {unknown[0]!r}; x has only {', '.join(map(str, x))}")
        if isinstance(graph.input, dict):
            return keras.tree.flatten({key: where.get(key, 0) for key in graph.input})  # type: ignore[no-any-return]
        return [where.get(spec.name, 0) for spec in specs]
    dims = keras.tree.flatten(where) if isinstance(where, list | tuple) else [where] * len(specs)
    if len(dims) != len(specs) or isinstance(where, dict):
        raise UsageError(f"pipeline: rows={where} does not match x; the model has {len(specs)} inputs")
    return dims


_OF_NUMBERS = "Keras reads a list as a list of tensors: convert a list of numbers with numpy.asarray"


def _tensor(leaf: Any, what: str) -> tf.Tensor:
    """Convert a user's value to a dense tensor. Raises UsageError if it is no tensor, or is ragged or sparse."""
    for kind, remedy in _NOT_DENSE:
        if isinstance(leaf, kind):
            raise UsageError(
                f"pipeline: {what}: got a {kind.__name__}, which cannot be cut into microbatches and sent between "
                f"stages: give a dense tensor, such as {remedy}"
            )
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        text = str(error).partition("\n")[0][:200]
        raise UsageError(
            f"pipeline: {what}: expected a tensor or an array, got {type(leaf).__name__}: {text}"
        ) from error


_NOT_DENSE = (
    (tf.RaggedTensor, "its to_tensor(), with a mask or the rows' lengths as another input where padding matters"),
    (tf.SparseTensor, "tf.sparse.to_dense of it"),
    (tf.IndexedSlices, "tf.convert_to_tensor of it"),
)


def as_tensors(value: Any, what: str) -> Any:
    """Convert nested arrays to tensors; None stays. what: names the value in errors."""
    return keras.tree.map_structure(lambda leaf: leaf if leaf is None else _tensor(leaf, what), value)


def weights_as_tensors(value: Any, outputs: int) -> Any:
    """Convert the sample weights of a batch to tensors. For one output a list of numbers works too, as in Keras."""
    if outputs == 1 and isinstance(value, list | tuple) and value and all(isinstance(n, int | float) for n in value):
        value = np.asarray(value, keras.config.floatx())
    return as_tensors(value, "sample_weight")


def rows_in(value: Any, what: str, where: Any = 0) -> int:
    """Return the number of rows of nested tensors. where: the dimensions of the rows, as in `Rows`.

    Raises UsageError if tensors have different numbers of rows, or none.
    """
    counts = []

    def look(place: Any, leaf: Any) -> None:
        if leaf is None:
            return
        if not hasattr(leaf, "shape"):
            kind = type(leaf).__name__
            raise UsageError(f"pipeline: {what}: expected tensors or arrays, got {kind}; {_OF_NUMBERS}")
        counts.append((place, leaf.shape))

    each(look, where, value)
    return number_of_rows(counts, what, f"single numbers ({_OF_NUMBERS})" if len(counts) > 1 else "no tensor with rows")


def cut_by_rows(value: Any, microbatches: int, what: str, where: Any = 0) -> tuple[list[Any], list[int]]:
    """Return the microbatches of a batch, and the number of rows of each. Raises UsageError as `rows_in` does."""
    parts = rows_of(rows_in(value, what, where), microbatches)
    return [take_rows(value, part, where) for part in parts], [part.stop - part.start for part in parts]


def cut_by_user(parts: Any, microbatches: int, what: str, where: Any = 0) -> tuple[list[Any], list[int]]:
    """Return microbatches that the user has cut, and the number of rows of each; missing ones at the end have 0 rows.

    Raises UsageError if there are too many of them, or if a microbatch without rows is not at the end.
    """
    return pad_microbatches(parts, microbatches, what, lambda part, name: rows_in(part, name, where))


def take_rows(value: Any, rows: slice, where: Any = 0) -> Any:
    """Return a slice of rows of nested tensors."""

    def one(place: Any, leaf: Any) -> Any:
        if leaf is None or not len(leaf.shape) or place == WHOLE:
            return leaf
        return leaf[(*[slice(None)] * place, rows)]

    return each(one, where, value)


def join_microbatches(parts: Sequence[tf.Tensor], rows: Sequence[int], place: Any) -> tf.Tensor:
    """Concatenate an output of all microbatches along its rows. Raises UsageError if its number of rows is wrong."""
    if place == WHOLE:
        return parts[0]
    for part, count in zip(parts, rows, strict=True):
        check_result(part.shape, place, count, "output")
    return tf.concat(parts, place)


def digest(value: Any) -> int:
    """Return a digest of nested tensors, without string tensors; NONE for None."""
    if value is None:
        return NONE
    leaves = keras.tree.flatten(sort_by_key(value))
    return digest_of(to_array(leaf) for leaf in leaves if leaf is not None and leaf.dtype != tf.string)


# The data that `fit` gets


def are_arrays(x: Any) -> bool:
    """Return whether `fit` got arrays, rather than an iterable of batches."""
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves)


def split_rows(data: Any, fraction: float) -> tuple[Any, Any]:
    """Split arrays into the first rows and the last `fraction` of rows, as Keras's validation_split does."""
    rows = rows_in(data, "fit")
    at = math.floor(rows * (1 - fraction))
    if not 0 < at < rows:
        raise UsageError(f"fit: validation_split={fraction} of {rows} rows leaves {at} rows for training")
    return take_rows(data, slice(0, at)), take_rows(data, slice(at, None))


def shuffle_batches(data: Sequence[Any], batch_size: int, seed: int) -> tf.data.Dataset:
    """Return batches of arrays (x, y, sample_weight), in a new order in each epoch.

    The order depends on `seed` alone, so it is the same on all ranks.
    """
    rows = rows_in(data, "fit")
    tensors = tuple(as_tensors(one, name) for one, name in zip(data, ("x", "y", "sample_weight"), strict=True))
    if any(leaf is not None and not leaf.shape.rank for leaf in keras.tree.flatten(tensors)):
        raise UsageError("fit: expected arrays with rows, got a single number: give one value for each row")
    generator = np.random.default_rng(seed)

    def orders() -> Iterator[Any]:
        order = generator.permutation(rows)
        for start in range(0, rows, batch_size):
            yield order[start : start + batch_size]

    def gather(places: tf.Tensor) -> Any:
        return keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.gather(leaf, places), given)

    given = tensors if tensors[2] is not None else tensors[:2]
    given = given if given[1] is not None or len(given) == 3 else given[:1]
    given = keras.tree.lists_to_tuples(given)  # a dataset reads a list as one tensor
    dataset = tf.data.Dataset.from_generator(orders, output_signature=tf.TensorSpec((None,), tf.int64))
    batches = dataset.apply(tf.data.experimental.assert_cardinality(-(-rows // batch_size)))
    return batches.map(gather).prefetch(1)
