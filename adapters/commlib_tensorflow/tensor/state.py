"""State of sharded Keras models in unsharded form: gathered from any number of ranks, loaded on any other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.sharding import Sharding
from commlib_tensorflow._shards import own_of, shard_of, whole_of
from commlib_tensorflow.pipelines._updates import lists_of, put_state, state_of
from commlib_tensorflow.pipelines.pipeline import Pipeline
from commlib_tensorflow.tensor._sharding import shard_variables
from commlib_tensorflow.tensor.names import check_model


def gather_weights(model: keras.Model) -> list[Array]:
    """Return a model's unsharded weights, in the order of `get_weights()`, on every rank.

    Collective over the axes over which its variables are sharded.

    Args:
        model: A model with or without sharded layers and experts, or a pipeline.
    """
    if isinstance(model, Pipeline):  # its own weights are those of this rank's stages
        whole: list[Array] = model.gather_weights()
        return whole
    _check_weights(model, "gather_weights")
    return [whole_of(weight, weight.numpy()) for weight in model.weights]


def set_weights(model: keras.Model, weights: Sequence[Any]) -> None:
    """Set the weights of a sharded model from unsharded ones: each rank takes its shards. Not collective.

    Args:
        model: The sharded model.
        weights: Unsharded values, in the order of `get_weights()`.

    Raises:
        UsageError: For another number of weights, or other shapes than the unsharded ones.
    """
    _check_weights(model, "set_weights")
    if not hasattr(weights, "__len__"):
        raise UsageError(f"set_weights: expected a list of arrays, got {type(weights).__name__}")
    if len(weights) != len(model.weights):
        raise UsageError(f"set_weights: got {len(weights)} weights, but the model has {len(model.weights)}")
    for weight, value in zip(model.weights, weights, strict=True):
        weight.assign(own_of(weight, value))


def _check_weights(model: Any, call: str) -> None:
    """Raise UsageError for anything without weights. Those of Keras 2 have some, which are whole."""
    if not hasattr(model, "weights"):
        check_model(model, call)


def gather_model(model: keras.Model) -> keras.Model:
    """Return an ordinary unsharded model on every rank, with the weights, compile settings and optimizer state.

    `gather_model(model).save(path)` writes a file that does not need commlib, and `parallelize(load_model(path), ...)`
    continues from it on any number of ranks. Collective over the axes over which variables are sharded.

    Args:
        model: A sharded model.

    Raises:
        UsageError: For a model that cannot be made from its configuration.

    Examples:
        ct.gather_model(model).save("whole.keras")  # on one rank or on all, to separate files
    """
    check_model(model, "gather_model")
    try:
        whole = model.__class__.from_config(model.get_config())
    except Exception as error:
        raise UsageError(
            f"gather_model: {model.name!r} cannot be made from its configuration ({type(error).__name__}: {error}): "
            "construct an unsharded model yourself, and load gather_weights(model) into it by set_weights()"
        ) from error
    weights = gather_weights(model)
    if not whole.built:  # Keras builds models from files in the same way
        with contextlib.suppress(Exception):
            whole.build_from_config(model.get_build_config())
    if [weight.shape for weight in whole.weights] != [weight.shape for weight in weights]:
        raise UsageError(
            f"gather_model: {model.name!r} is not built by its configuration: construct and call a model with the same "
            "arguments, and load gather_weights(model) into it by set_weights()"
        )
    whole.set_weights(weights)
    if model.compiled:
        known = model.optimizer._trainable_variables if model.optimizer.built else model.trainable_variables
        known_ids = set(
            map(id, known)
        )  # whether frozen since or not: compile_from_config builds an optimizer for the currently trainable weights
        whole.trainable = True
        for weight, gathered in zip(model.weights, whole.weights, strict=True):
            gathered.trainable = id(weight) in known_ids
        whole.compile_from_config(model.get_compile_config())
        _take_optimizer(model, whole)
    _take_settings(model, whole)
    return whole


def _take_settings(model: Any, whole: Any) -> None:
    """Copy settings that a model's configuration does not hold."""
    for layer, gathered in zip(model._flatten_layers(), whole._flatten_layers(), strict=True):
        if gathered.trainable != layer.trainable:
            gathered.trainable = layer.trainable
        if getattr(gathered, "lora_enabled", False):
            gathered.lora_alpha = layer.lora_alpha  # not all Keras layers take it from a configuration
    for variable, gathered in zip(model.weights, whole.weights, strict=True):  # for weights inside a frozen layer
        if gathered.trainable != variable.trainable:
            gathered.trainable = variable.trainable


def _take_optimizer(model: Any, whole: Any) -> None:
    """Copy the optimizer state of a sharded model into an unsharded one."""
    pairs = [(model.optimizer, whole.optimizer)]
    if (inner := getattr(model.optimizer, "inner_optimizer", None)) is not None:  # of a LossScaleOptimizer
        pairs.append((inner, whole.optimizer.inner_optimizer))
    gathered = {id(weight): other for weight, other in zip(model.weights, whole.weights, strict=True)}
    for optimizer, other in pairs:
        singles, lists = _whole_state(optimizer)
        if not singles:
            continue
        weights = [gathered.get(id(weight)) for weight in optimizer._trainable_variables]
        if any(weight is None for weight in weights):
            raise UsageError(
                f"gather_model: {optimizer.name} of {model.name!r} updates weights that are not the model's: "
                "compile it again, or use gather_weights(model)"
            )
        if not other.built:
            other.build(weights)
        put_state(other, singles, {name: dict(enumerate(values)) for name, values in lists.items()})


def shard_optimizer(optimizer: Any) -> None:
    """Shard an optimizer's state like its weights, which were sharded after it was built."""
    for name, variables in lists_of(optimizer).items():
        for weight, variable in zip(optimizer._trainable_variables, variables, strict=True):
            shard = shard_of(weight)
            if shard is None or not isinstance(
                shard.sharding, Sharding
            ):  # experts are created sharded, before an optimizer is built
                continue
            if variable is not None and tuple(variable.shape) == shard.sharding.shape:
                shard_variables(f"{name} of {optimizer.name}", shard.axis, [(variable, shard.sharding)])
    # Keras finds weights by TensorFlow's variables, which have changed.
    optimizer._trainable_variables_indices = {
        optimizer._var_key(weight): place for place, weight in enumerate(optimizer._trainable_variables)
    }


def _whole_state(optimizer: Any) -> tuple[dict[str, Array], dict[str, list[Array | None]]]:
    singles, lists = state_of(optimizer)
    weights = optimizer._trainable_variables
    return singles, {
        name: [
            None if value is None else whole_of(weight, value) for weight, value in zip(weights, values, strict=True)
        ]
        for name, values in lists.items()
    }
