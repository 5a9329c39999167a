"""Batches: cut what a user gives into microbatches, and shuffle arrays alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.pipeline.batch import NONE, by_key, rows_of
from commlib.pipeline.batch import digest as digest_of
from commlib.pipeline.rows import REMEDY, WHOLE, each
from commlib_tensorflow._bridge import to_array


def inputs_of(graph: Any, x: Any) -> list[tf.Tensor]:
    """Return a batch as tensors that a functional model's inputs take, in their order, as the model itself would.

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
    return [_fitted(value, spec) for value, spec in zip(flat, specs, strict=True)]


def _fitted(value: Any, spec: Any) -> tf.Tensor:
    """Return a value with an input's dtype, and with a last dimension of 1 more or less where that is what it has."""
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
    """Return where the rows of each of the model's inputs are, given x and where they are in it: see `Rows`."""
    specs = graph.inputs
    if isinstance(where, dict) and isinstance(x, dict):
        if unknown := [name for name in where if name not in x]:
            raise UsageError(f"pipeline: rows names {unknown[0]!r}; x has {', '.join(map(str, x))}")
        if isinstance(graph.input, dict):
            return keras.tree.flatten({key: where.get(key, 0) for key in graph.input})  # type: ignore[no-any-return]
        return [where.get(spec.name, 0) for spec in specs]
    found = keras.tree.flatten(where) if isinstance(where, list | tuple) else [where] * len(specs)
    if len(found) != len(specs) or isinstance(where, dict):
        raise UsageError(f"pipeline: rows says {where} of x; the model has {len(specs)} inputs")
    return found


_OF_NUMBERS = "a list is one of tensors to Keras: of a list of numbers give numpy.asarray"


def _tensor(leaf: Any, what: str) -> tf.Tensor:
    """Return a tensor of what a user gives. Raises UsageError for what is none, and for what has rows of its own."""
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
    """Return nested arrays as tensors; None stays. what: they are, for UsageError where one is none."""
    return keras.tree.map_structure(lambda leaf: leaf if leaf is None else _tensor(leaf, what), value)


def weights_as_tensors(value: Any, outputs: int) -> Any:
    """Return sample weights of a batch as tensors: of one output also a list of numbers, which Keras takes as well."""
    if outputs == 1 and isinstance(value, list | tuple) and value and all(isinstance(n, int | float) for n in value):
        value = np.asarray(value, keras.config.floatx())
    return as_tensors(value, "sample_weight")


def rows_in(value: Any, what: str, where: Any = 0) -> int:
    """Return how many rows nested tensors have. Raises UsageError if they have different numbers, or none.

    where: their rows are, as `Rows` says it.
    """
    counts: set[int] = set()

    def count(place: Any, leaf: Any) -> None:
        if leaf is not None and not hasattr(leaf, "shape"):
            got = type(leaf).__name__
            raise UsageError(f"pipeline: {what}: expected tensors or arrays, got {got}; {_OF_NUMBERS}")
        if leaf is not None and len(leaf.shape) and place != WHOLE:
            if place >= len(leaf.shape):
                raise UsageError(f"pipeline: {what}: rows says {place} of a tensor of shape {tuple(leaf.shape)}")
            counts.add(int(leaf.shape[place]))

    each(count, where, value)
    if len(counts) != 1:
        got = f"different ones: {', '.join(map(str, sorted(counts)))}" if counts else "no tensor with rows"
        if not counts and len([leaf for leaf in keras.tree.flatten(value) if leaf is not None]) > 1:
            got = f"single numbers ({_OF_NUMBERS})"
        raise UsageError(
            f"pipeline: {what}: expected tensors of one number of rows (first dimension), got {got}; where rows are in "
            f"another dimension, or a tensor is for all microbatches, {REMEDY}"
        )
    return counts.pop()


def cut_by_rows(value: Any, microbatches: int, what: str, where: Any = 0) -> tuple[list[Any], list[int]]:
    """Return the microbatches of a batch, and the rows of each. Raises UsageError as `rows_in` does."""
    parts = rows_of(rows_in(value, what, where), microbatches)
    return [taken(value, part, where) for part in parts], [part.stop - part.start for part in parts]


def cut_by_user(parts: Any, microbatches: int, what: str, where: Any = 0) -> tuple[list[Any], list[int]]:
    """Return microbatches that a user has cut, and the rows of each; those that are missing at the end have none.

    Raises UsageError if there are too many of them, or those without rows are not the last ones.
    """
    check_parts(parts, microbatches, what)
    missing = microbatches - len(parts)
    counts = [rows_in(part, f"{what}[{number}]", where) for number, part in enumerate(parts)]
    if 0 in counts[: len(counts) - counts[::-1].count(0)]:
        raise UsageError(f"pipeline: {what}: microbatches without rows must be the last ones, got {counts} rows")
    return [*parts, *[None] * missing], [*counts, *[0] * missing]


def check_parts(parts: Any, microbatches: int, what: str) -> None:
    """Raise UsageError if microbatches are no list, or too many."""
    if not isinstance(parts, list | tuple) or not 0 < len(parts) <= microbatches:
        got = f"{len(parts)} of them" if isinstance(parts, list | tuple) else type(parts).__name__
        raise UsageError(f"pipeline: {what}: expected a list of at most {microbatches} microbatches, got {got}")


def taken(value: Any, rows: slice, where: Any = 0) -> Any:
    """Return some rows of nested tensors."""

    def one(place: Any, leaf: Any) -> Any:
        if leaf is None or not len(leaf.shape) or place == WHOLE:
            return leaf
        return leaf[(*[slice(None)] * place, rows)]

    return each(one, where, value)


def together(parts: Sequence[tf.Tensor], rows: Sequence[int], place: Any) -> tf.Tensor:
    """Return an output of microbatches of so many rows as that of the batch. Raises UsageError if it has others."""
    if place == WHOLE:
        return parts[0]
    for part, count in zip(parts, rows, strict=True):
        if place >= len(part.shape) or int(part.shape[place]) != count:
            raise UsageError(
                f"pipeline: a microbatch of {count} rows has output of shape {tuple(part.shape)}, so its rows are not "
                f"in dimension {place}: {REMEDY}"
            )
    return tf.concat(parts, place)


def digest(value: Any) -> int:
    """Return a number that tells nested tensors apart, but for those of strings; NONE for None."""
    if value is None:
        return NONE
    leaves = keras.tree.flatten(by_key(value))
    return digest_of(to_array(leaf) for leaf in leaves if leaf is not None and leaf.dtype != tf.string)


# What `fit` is given


def are_arrays(x: Any) -> bool:
    """Return whether `fit` is given arrays, rather than what yields batches."""
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves)


def split_rows(data: Any, fraction: float) -> tuple[Any, Any]:
    """Return the first rows of arrays, and the last ones, which are so much of them, as Keras's validation_split."""
    rows = rows_in(data, "fit")
    at = math.floor(rows * (1 - fraction))
    if not 0 < at < rows:
        raise UsageError(f"fit: validation_split={fraction} of {rows} rows leaves {at} to train with")
    return taken(data, slice(0, at)), taken(data, slice(at, None))


def shuffled(data: Sequence[Any], batch_size: int, seed: int) -> tf.data.Dataset:
    """Return batches of arrays (x, y, sample_weight), in another order each time that they are gone through.

    The order is that of `seed` alone, so it is the same on all ranks.
    """
    rows = rows_in(data, "fit")
    tensors = tuple(as_tensors(one, name) for one, name in zip(data, ("x", "y", "sample_weight"), strict=True))
    if any(leaf is not None and not leaf.shape.rank for leaf in keras.tree.flatten(tensors)):
        raise UsageError("fit: expected arrays with rows, got a single number among them; give one for each row")
    generator = np.random.default_rng(seed)

    def orders() -> Iterator[Any]:
        order = generator.permutation(rows)
        for start in range(0, rows, batch_size):
            yield order[start : start + batch_size]

    def gather(places: tf.Tensor) -> Any:
        return keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.gather(leaf, places), given)

    given = tensors if tensors[2] is not None else tensors[:2]
    given = given if given[1] is not None or len(given) == 3 else given[:1]
    given = keras.tree.lists_to_tuples(given)  # a list is one tensor to a dataset
    dataset = tf.data.Dataset.from_generator(orders, output_signature=tf.TensorSpec((None,), tf.int64))
    batches = dataset.apply(tf.data.experimental.assert_cardinality(-(-rows // batch_size)))
    return batches.map(gather).prefetch(1)
