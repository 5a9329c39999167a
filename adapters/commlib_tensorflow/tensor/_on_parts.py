"""On parts: try whether a layer of Keras that has style Sequence looks at what other ranks have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.functional.on_parts import looks_elsewhere, refuse_move
from commlib.tensor import styles
from commlib.tensor.equations import along
from commlib.tensor.recording import replaced
from commlib.tensor.styles import Style
from commlib_tensorflow._unnoticed import unnoticed
from commlib_tensorflow.tensor import moves
from commlib_tensorflow.tensor._guided import exchanged


def on_parts(style: Style | None, layer: Any, args: Any, options: Any, *, training: bool) -> dict[str, Any]:
    """Return the equation of a layer with style Sequence that, as tried, looks at what other ranks have; else {}.

    One that cannot be tried, as for the random numbers that it draws, is said to draw.
    """
    if not isinstance(style, styles.Sequence):
        return {}
    looks = _looks_at_others(layer, args, options, style.dim, training=training)
    if looks is None:
        return {"draws": True}
    if not looks:
        return {}
    given = next(one for one in keras.tree.flatten((args, options)) if tf.is_tensor(one))
    return {"equation": along(tuple(given.shape), (style.dim % len(given.shape),))}


def _looks_at_others(layer: Any, args: Any, options: Any, dim: int, *, training: bool) -> bool | None:
    """Return whether a layer makes of parts along `dim` what it does not make of all; None if nobody can tell.

    It is tried on random numbers, for the tensors that it is called with are of a graph, and forward alone.
    """
    given = [one for one in keras.tree.flatten((args, options)) if tf.is_tensor(one)]
    rank = given[0].shape.rank if given else 0
    if not -rank <= dim < rank:
        return False
    if not all(one.shape.is_fully_defined() for one in given):
        return None

    def called(mode: bool, arrays: Sequence[Array]) -> list[Array]:
        new = {id(one): tf.constant(array) for one, array in zip(given, arrays, strict=True)}
        own_args, own_options = exchanged((args, options), new)
        own_options = {name: one for name, one in own_options.items() if name != "training"}  # not all take it
        if "training" in inspect.signature(layer.call).parameters and len(args) < 2:
            own_options = {**own_options, "training": mode}
        results = keras.tree.flatten(layer.call(*own_args, **own_options))
        return [np.asarray(one) for one in results if tf.is_tensor(one)]

    random = np.random.default_rng(0)
    arrays = [(random.normal(size=one.shape) + 0.5).astype(one.dtype.as_numpy_dtype) for one in given]
    with unnoticed(layer), tf.init_scope(), keras.StatelessScope(), replaced(moves, "moved", refuse_move):
        calls = [functools.partial(called, mode) for mode in dict.fromkeys((training, False))]
        return looks_elsewhere(calls, arrays, dim % rank)
