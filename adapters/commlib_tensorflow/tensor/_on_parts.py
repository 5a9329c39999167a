"""On parts: try whether a layer of Keras that has style Sequence looks at what other ranks have."""

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
from commlib.tensor_parallel.checks.on_parts import UNTRIED, refuse_move, tried
from commlib.tensor_parallel.equations import along
from commlib.tensor_parallel.recording import replaced
from commlib.tensor_parallel.styles import Style
from commlib_tensorflow._unnoticed import unnoticed
from commlib_tensorflow.tensor import moves
from commlib_tensorflow.tensor._guided import exchanged


def on_parts(style: Style | None, layer: Any, args: Any, options: Any, *, training: bool) -> dict[str, Any]:
    """Return the equation of a layer with style Sequence that, as tried, looks at what other ranks have; else {}.

    Of one that cannot be tried, as for the random numbers that it draws, that is what nobody could tell.
    """
    if not isinstance(style, styles.Sequence):
        return {}
    found = _tried(layer, args, options, style.dim, training=training)
    if found is not None:
        return {"untold": found} if found else {}
    given = next(one for one in keras.tree.flatten((args, options)) if tf.is_tensor(one))
    return {"equation": along(tuple(given.shape), (style.dim % len(given.shape),))}


def _tried(layer: Any, args: Any, options: Any, dim: int, *, training: bool) -> str | None:
    """Return what nobody could tell of a layer tried on parts along `dim`; None if it looks at other ones.

    It is tried on random numbers, for the tensors that it is called with are of a graph, and forward alone.
    """
    given = [one for one in keras.tree.flatten((args, options)) if tf.is_tensor(one)]
    rank = given[0].shape.rank if given else 0
    if not -rank <= dim < rank:
        return ""
    if any(one.shape.rank is None for one in given):
        return UNTRIED

    def called(mode: bool, arrays: Sequence[Array]) -> list[Array]:
        new = {id(one): tf.constant(array) for one, array in zip(given, arrays, strict=True)}
        own_args, own_options = exchanged((args, options), new)
        own_options = {name: one for name, one in own_options.items() if name != "training"}  # not all take it
        if "training" in inspect.signature(layer.call).parameters and len(args) < 2:
            own_options = {**own_options, "training": mode}
        results = keras.tree.flatten(layer.call(*own_args, **own_options))
        return [np.asarray(one) for one in results if tf.is_tensor(one)]

    arrays = [_numbers_like(one, dim % rank, seed) for seed, one in enumerate(given)]
    with (
        tf.init_scope(),
        unnoticed(layer),
        keras.StatelessScope(),
        replaced(moves, "moved", refuse_move),
        _quiet(layer),
    ):
        calls = [functools.partial(called, mode) for mode in dict.fromkeys((training, False))]
        return tried(calls, arrays, dim % rank)


@contextmanager
def _quiet(layer: Any) -> Iterator[None]:
    """Let layers within one draw no random numbers for elements, which are right on parts, and others there."""
    own = [
        one for one in layer._flatten_layers() if isinstance(one, _DROPOUTS) and not getattr(one, "noise_shape", None)
    ]
    kept = [(one, name, vars(one)[name]) for one in own for name in ("rate", "stddev") if name in vars(one)]
    try:
        for one, name, _ in kept:
            vars(one)[name] = 0.0
        yield
    finally:
        for one, name, value in kept:
            vars(one)[name] = value


_DROPOUTS = keras.layers.Dropout, keras.layers.AlphaDropout, keras.layers.GaussianDropout, keras.layers.GaussianNoise


def _numbers_like(one: Any, dim: int, seed: int) -> Array:
    """Return random numbers; flags of which some are false, and small integers.

    Lengths that are not known are some, that along `dim` another one.
    """
    lengths = enumerate(one.shape.as_list())
    shape = tuple((4 if at == dim else 3) if length is None else length for at, length in lengths)
    random, dtype = np.random.default_rng(seed), one.dtype.as_numpy_dtype
    is_discrete = one.dtype.is_bool or one.dtype.is_integer
    found: Array = (
        random.integers(0, 2 if one.dtype.is_bool else 4, shape) if is_discrete else random.normal(size=shape) + 0.5
    )
    return found.astype(dtype)
