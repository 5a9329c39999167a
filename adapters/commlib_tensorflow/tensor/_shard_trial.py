"""Shard trial: test whether a Keras layer with style Sequence depends on values of other ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.tensor_parallel import styles
from commlib.tensor_parallel.checks.position_checks import UNTRIED, refuse_move, try_positions
from commlib.tensor_parallel.equations import dimwise
from commlib.tensor_parallel.recording import replace_attribute
from commlib.tensor_parallel.styles import Style
from commlib_tensorflow._trial_run import preserve_model
from commlib_tensorflow.tensor import moves
from commlib_tensorflow.tensor._guided_calls import replace_tensors


def try_on_shards(style: Style | None, layer: Any, args: Any, options: Any, *, training: bool) -> dict[str, Any]:
    """Return the equation of a layer with style Sequence that depends on other ranks' values in a trial; otherwise {}.

    If it cannot be tried, for example because it draws random numbers, the reason is returned as "untold".
    """
    if not isinstance(style, styles.Sequence):
        return {}
    fields = _try(layer, args, options, style.dim, training=training)
    if fields is not None:
        return {"open_doubt": fields} if fields else {}
    given = next(one for one in keras.tree.flatten((args, options)) if tf.is_tensor(one))
    return {"equation": dimwise(tuple(given.shape), (style.dim % len(given.shape),))}


def _try(layer: Any, args: Any, options: Any, dim: int, *, training: bool) -> str | None:
    """Return why a layer could not be tried on shards along `dim` ("" if it was independent); None if it is dependent.

    The trial uses random values, because the arguments are graph tensors, and runs only the forward.
    """
    given = [one for one in keras.tree.flatten((args, options)) if tf.is_tensor(one)]
    rank = given[0].shape.rank if given else 0
    if not -rank <= dim < rank:
        return ""
    if any(one.shape.rank is None for one in given):
        return UNTRIED

    def called(mode: bool, arrays: Sequence[Array]) -> list[Array]:
        new = {id(one): tf.constant(array) for one, array in zip(given, arrays, strict=True)}
        own_args, own_options = replace_tensors((args, options), new)
        own_options = {name: one for name, one in own_options.items() if name != "training"}  # not all layers take it
        if "training" in inspect.signature(layer.call).parameters and len(args) < 2:
            own_options = {**own_options, "training": mode}
        results = keras.tree.flatten(layer.call(*own_args, **own_options))
        return [np.asarray(one) for one in results if tf.is_tensor(one)]

    arrays = [_numbers_like(one, dim % rank, seed) for seed, one in enumerate(given)]
    with (
        tf.init_scope(),
        preserve_model(layer),
        keras.StatelessScope(),
        replace_attribute(moves, "redistribute", refuse_move),
        _disable_dropout(layer),
    ):
        calls = [functools.partial(called, mode) for mode in dict.fromkeys((training, False))]
        return try_positions(calls, arrays, dim % rank)


@contextmanager
def _disable_dropout(layer: Any) -> Iterator[None]:
    """Disable element-wise random layers inside: they are right on shards, but would differ in each run."""
    own = [
        one for one in layer._flatten_layers() if isinstance(one, _DROPOUTS) and not getattr(one, "noise_shape", None)
    ]
    saved = [(one, name, vars(one)[name]) for one in own for name in ("rate", "stddev") if name in vars(one)]
    try:
        for one, name, _ in saved:
            vars(one)[name] = 0.0
        yield
    finally:
        for one, name, value in saved:
            vars(one)[name] = value


_DROPOUTS = keras.layers.Dropout, keras.layers.AlphaDropout, keras.layers.GaussianDropout, keras.layers.GaussianNoise


def _numbers_like(one: Any, dim: int, seed: int) -> Array:
    """Return random values; for booleans some false ones, and small integers.

    Unknown lengths are 3, or 4 along `dim`.
    """
    lengths = enumerate(one.shape.as_list())
    shape = tuple((4 if at == dim else 3) if length is None else length for at, length in lengths)
    random, dtype = np.random.default_rng(seed), one.dtype.as_numpy_dtype
    is_discrete = one.dtype.is_bool or one.dtype.is_integer
    numbers: Array = (
        random.integers(0, 2 if one.dtype.is_bool else 4, shape) if is_discrete else random.normal(size=shape) + 0.5
    )
    return numbers.astype(dtype)
