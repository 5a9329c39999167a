"""save_experts, load_experts: files that any number of ranks, and PyTorch, read: see `commlib.expert.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert import checkpoint
from commlib_tensorflow._shards import own_of, whole_of, whole_shape
from commlib_tensorflow._updates import lists_of
from commlib_tensorflow.expert.moe import MoE
from commlib_tensorflow.pipeline import Pipeline

_MOMENTS = {"_momentums": "first", "_velocities": "second", "momentums": "momentum"}


def save_experts(path: checkpoint.Path, model: keras.Model, optimizer: Any = None) -> None:
    """Write the mixtures of experts of a model to a file, with what an optimizer (Adam, AdamW, SGD) keeps for them.

    Experts are in it by their global numbers. Collective; the first rank writes.
    """
    layers = _layers(model)
    found = []
    for layer in layers:
        arrays: dict[str, Array] = {}
        for name, variable, is_kernel in _named(layer):
            arrays[name] = _turned(whole_of(variable, variable.numpy()), is_kernel)
            for own, moment, factor in _moments(optimizer, variable):
                arrays[f"{name}/{own}"] = _turned(whole_of(variable, moment.numpy()), is_kernel) / factor
                arrays[f"{name}/step"] = np.array(_plain(optimizer).iterations.numpy(), np.float32)
        found.append(arrays)
    if layers:
        checkpoint.write(layers[0].mixture.ranks, path, found)


def load_experts(path: checkpoint.Path, model: keras.Model, optimizer: Any = None) -> None:
    """Load what `save_experts` of either framework has written: each rank takes its part. Collective.

    An optimizer must have been built, and goes on from the step of the file. Raises UsageError on all ranks for another
    model.
    """
    layers = _layers(model)

    def put(found: list[dict[str, Array]]) -> None:
        shapes = [
            {name: _shape(variable, is_kernel) for name, variable, is_kernel in _named(layer)} for layer in layers
        ]
        checkpoint.check(found, shapes)
        for layer, arrays in zip(layers, found, strict=True):
            for name, variable, is_kernel in _named(layer):
                variable.assign(own_of(variable, _turned(arrays[name], is_kernel)))
                for own, moment, factor in _moments(optimizer, variable):
                    key = f"{name}/{own}"
                    if key in arrays:
                        moment.assign(own_of(variable, _turned(arrays[key], is_kernel)) * factor)
                    if f"{name}/step" in arrays:
                        _plain(optimizer).iterations.assign(int(arrays[f"{name}/step"]))

    if layers:
        checkpoint.load_together(layers[0].mixture.ranks, path, put)


def _layers(model: Any) -> list[MoE]:
    if isinstance(model, Pipeline):
        raise UsageError("experts of a pipeline are on several ranks: save what pipe.gather_weights() returns")
    return [layer for layer in model._flatten_layers() if isinstance(layer, MoE)]


def _named(layer: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, variable, whether it is a kernel of Keras, which has inputs first)."""
    yield "router", layer.router, False
    for what, variables in (("experts", layer.stacks), ("shared", layer.shared and layer.shared.trainable_variables)):
        for place, variable in enumerate(variables or ()):
            yield f"{what}.{place}", variable, variable.name.endswith("kernel")
    if layer.expert_bias is not None:
        yield "expert_bias", layer.expert_bias, False


def _turned(array: Array, is_kernel: bool) -> Array:
    return np.ascontiguousarray(np.swapaxes(array, -1, -2)) if is_kernel else array


def _shape(variable: Any, is_kernel: bool) -> tuple[int, ...]:
    shape = whole_shape(variable)
    return (*shape[:-2], shape[-1], shape[-2]) if is_kernel else shape


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _moments(optimizer: Any, variable: Any) -> Iterator[tuple[str, Any, float]]:
    """Yield (name, variable, factor) of what an optimizer keeps for a variable: its values are those of a file by it.

    Keras' SGD keeps updates, which have the learning rate in them.
    """
    plain = _plain(optimizer)
    if plain is None or not plain.built or not variable.trainable:
        return
    place = plain._get_variable_index(variable)
    for name, variables in lists_of(plain).items():
        if name in _MOMENTS and variables[place] is not None:
            factor = -float(plain.learning_rate.numpy()) if name == "momentums" else 1.0
            yield _MOMENTS[name], variables[place], factor
