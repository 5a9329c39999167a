"""save_experts, load_experts: files for any number of ranks, and for PyTorch: see `commlib.expert.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert import checkpoint
from commlib.expert.checkpoint import STEP
from commlib_tensorflow._shards import own_of, shard_of, whole_of, whole_shape
from commlib_tensorflow.expert._optimizer_states import OptimizerStates
from commlib_tensorflow.expert.moe import MoE
from commlib_tensorflow.expert.rebalance import mixtures_of
from commlib_tensorflow.pipelines.pipeline import Pipeline


def save_experts(path: checkpoint.Path, model: keras.Model, optimizer: Any = None) -> None:
    """Write the mixtures of experts of a model to a file, with the optimizer state for them.

    Experts are stored by their global numbers. Collective; the first rank writes.

        ct.save_experts("run/experts", model, model.optimizer)

    Args:
        path: The file.
        model: The model with mixtures of experts.
        optimizer: Its optimizer; None: weights only.

    Raises:
        UsageError: For a model without mixtures; on all ranks for an optimizer that is not built, has accumulated
            gradients that it has not applied yet, or has state that belongs to no weight.
        MismatchError: If ranks pass different ones.
    """
    layers = _layers("save_experts", model)
    ranks = layers[0].mixture.ranks
    checkpoint.save_together(ranks, path, lambda: _parts(layers, OptimizerStates("save_experts", optimizer)))


def _parts(layers: Sequence[MoE], states: OptimizerStates) -> list[checkpoint.ArrayMakers]:
    """Return the functions that make the arrays of each layer, by name; most are collective."""
    parts_by_layer = []
    for layer in layers:
        parts: checkpoint.ArrayMakers = {}
        for name, variable, is_kernel in _named_weights(layer):
            parts[name] = partial(_to_file, variable, variable, is_kernel)
            for key, slot in states.of(variable).items():
                _check_shape(variable, key, slot)
                parts[f"{name}/{key}"] = partial(_to_file, variable, slot, is_kernel)
            if (step := states.step(variable)) is not None:
                parts[f"{name}/{STEP}"] = step.copy
        parts_by_layer.append(parts)
    return parts_by_layer


def load_experts(path: checkpoint.Path, model: keras.Model, optimizer: Any = None) -> None:
    """Load a file of `save_experts`, from either framework: each rank takes its part. Collective.

    An optimizer must be built, and continues from the step in the file. From PyTorch's files it takes the state of
    Adam, AdamW and SGD.

        ct.load_experts("run/experts", model, model.optimizer)

    Args:
        path: The file.
        model: The model with mixtures of experts.
        optimizer: Its optimizer; None: weights only.

    Raises:
        UsageError: On all ranks for a model without mixtures, for another model, or for the state of another optimizer;
            nothing is changed then.
    """
    layers = _layers("load_experts", model)
    titles = [layer.mixture.name for layer in layers]

    def find(read: list[dict[str, Array]]) -> list[tuple[Any, Any]]:
        named, states = [list(_named_weights(layer)) for layer in layers], OptimizerStates("load_experts", optimizer)
        shapes = [{name: _shape(variable, kernel) for name, variable, kernel in own} for own in named]
        checkpoint.check(read, shapes, titles)
        values: list[tuple[Any, Any]] = []
        steps: set[int] = set()
        if states.is_there:
            slots = [{name: tuple(states.of(variable)) for name, variable, _ in own} for own in named]
            checkpoint.check_states(read, slots, states.name, titles)
            steps = {int(array) for arrays in read for key, array in arrays.items() if key.endswith(f"/{STEP}")}
            values += states.continue_from(steps)
        for arrays, own in zip(read, named, strict=True):
            for name, variable, is_kernel in own:
                values.append((variable, _from_file(variable, variable, arrays[name], is_kernel)))
                for key, to in states.of(variable).items():
                    _check_shape(variable, key, to)
                    value = states.value(arrays, name, key, variable, steps)
                    values.append((to, _from_file(variable, to, value, is_kernel)))
        return values

    for variable, value in checkpoint.load_together(layers[0].mixture.ranks, path, find):
        variable.assign(value)


def _layers(verb: str, model: Any) -> list[MoE]:
    if isinstance(model, Pipeline):
        raise UsageError("experts of a pipeline are on several ranks: save the result of pipe.gather_weights()")
    return mixtures_of(verb, model)


def _named_weights(layer: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, variable, whether it is a Keras kernel, which has inputs first)."""
    yield "router", layer.router, False
    for what, variables in (("experts", layer.stacks), ("shared", layer.shared and layer.shared.trainable_variables)):
        for place, variable in enumerate(variables or ()):
            yield f"{what}.{place}", variable, variable.name.endswith("kernel")
    if layer.expert_bias is not None:
        yield "expert_bias", layer.expert_bias, False


def _shape(variable: Any, is_kernel: bool) -> tuple[int, ...]:
    shape = whole_shape(variable)
    return (*shape[:-2], shape[-1], shape[-2]) if is_kernel else shape


def _to_file(weight: Any, slot: Any, is_kernel: bool) -> Array:
    """Return the unsharded form of a weight, or of its state, as stored in a file."""
    if slot.shape != weight.shape:
        array: Array = slot.numpy()
        return array
    return _transpose(whole_of(weight, slot.numpy()), is_kernel)


def _from_file(weight: Any, slot: Any, value: Array, is_kernel: bool) -> Any:
    """Convert a file's value to this rank's part."""
    return value if slot.shape != weight.shape else own_of(weight, _transpose(value, is_kernel))


def _transpose(array: Array, is_kernel: bool) -> Array:
    return np.ascontiguousarray(np.swapaxes(array, -1, -2)) if is_kernel else array


def _check_shape(weight: Any, key: str, slot: Any) -> None:
    """Refuse state of a sharded weight whose shape differs from the weight's."""
    if shard_of(weight) is not None and tuple(slot.shape) not in ((), tuple(weight.shape)):
        raise UsageError(
            f"save_experts: {key} of {weight.path} has shape {tuple(slot.shape)}, but this rank's experts have "
            f"{tuple(weight.shape)}, so its assignment to experts is unknown: pass no optimizer"
        )
