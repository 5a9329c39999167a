"""State of divided Keras models: as that of the whole model, gathered from any number of ranks, loaded on any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import keras

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.tensor.sharding import Sharding
from commlib_tensorflow._shards import own_of, shard_of, whole_of
from commlib_tensorflow._updates import lists_of, put_state, state_of
from commlib_tensorflow.tensor._dividing import divide


def gather_weights(model: keras.Model) -> list[Array]:
    """Return the weights of a model as `get_weights()` of the model that is whole does, on every rank.

    Collective over the axes that its variables are divided over.
    """
    return [whole_of(weight, weight.numpy()) for weight in model.weights]


def set_weights(model: keras.Model, weights: Sequence[Any]) -> None:
    """Set the weights of a divided model to those of the whole one: each rank takes its parts. Not collective.

    Raises UsageError for another number of weights, or other shapes than those of the whole.
    """
    if len(weights) != len(model.weights):
        raise UsageError(f"set_weights: {len(weights)} weights, but the model has {len(model.weights)}")
    for weight, value in zip(model.weights, weights, strict=True):
        weight.assign(own_of(weight, value))


def gather_model(model: keras.Model) -> keras.Model:
    """Return an ordinary model, whole, on every rank: with the weights, and what `compile` and training have made.

    `gather_model(model).save(path)` writes a file that needs nothing of commlib, and `parallelize(load_model(path),
    ...)` goes on with it on any number of ranks. Collective over the axes that variables are divided over. Raises
    UsageError for a model that cannot be made from its configuration.
    """
    try:
        whole = model.__class__.from_config(model.get_config())
    except Exception as error:
        raise UsageError(
            f"gather_model: {model.name!r} cannot be made from its configuration ({type(error).__name__}: {error}): "
            "make a whole model yourself, and give it gather_weights(model) by set_weights()"
        ) from error
    weights = gather_weights(model)
    if not whole.built:
        raise UsageError(f"gather_model: {model.name!r} is not built by its configuration: use gather_weights(model)")
    for layer, made in zip(model._flatten_layers(), whole._flatten_layers(), strict=True):
        if getattr(made, "lora_enabled", False):
            made.lora_alpha = layer.lora_alpha  # not all of Keras' layers take it from a configuration
    whole.set_weights(weights)
    if model.compiled:
        whole.compile_from_config(model.get_compile_config())
        singles, lists = _whole_state(model.optimizer)
        if singles:
            whole.optimizer.build(whole.trainable_variables)
            put_state(whole.optimizer, singles, {name: dict(enumerate(values)) for name, values in lists.items()})
    return whole


def divide_optimizer(optimizer: Any) -> None:
    """Divide what an optimizer keeps for each weight as the weights are, which have been divided after it was built."""
    for name, variables in lists_of(optimizer).items():
        for weight, variable in zip(optimizer._trainable_variables, variables, strict=True):
            shard = shard_of(weight)
            if shard is None or not isinstance(
                shard.sharding, Sharding
            ):  # experts are made divided, before an optimizer is
                continue
            if variable is not None and tuple(variable.shape) == shard.sharding.shape:
                divide(f"{name} of {optimizer.name}", shard.axis, [(variable, shard.sharding)])
    # Keras knows weights by TensorFlow's variables, which are others now.
    optimizer._trainable_variables_indices = {
        optimizer._var_key(weight): place for place, weight in enumerate(optimizer._trainable_variables)
    }


@cache
def kept_as(kind: type, plain: type) -> type:
    """Return a class of layers that are `kind`, and say that they are `plain` to who writes or reads files."""
    return type(kind.__name__, (InFiles, kind), {"__doc__": kind.__doc__, "__class__": property(lambda self: plain)})


class InFiles:
    """A layer over `axis`: take own parts of what is read; refuse to write them as if they were all."""

    axis: Any
    variables: list[Any]
    whole_by = "save gather_model(model), on which all ranks call gather_model and one of them save or export"
    """What to do instead, for errors."""

    def save_own_variables(self, store: Any) -> None:
        """Refuse: a file would have one rank's part."""
        self._check_whole()
        super().save_own_variables(store)  # type: ignore[misc]

    def check_export(self) -> None:
        """Raise UsageError where what is exported, to be served by one process, would have one rank's part."""
        self._check_whole()

    def _check_whole(self) -> None:
        if self.axis.size > 1:
            whose = f"rank {self.axis.rank} of {self.axis.comm.name}"
            raise UsageError(f"{whose} has a part of this model: {self.whole_by}")

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        if save_type == "savedmodel":  # tf.saved_model.save
            self.check_export()
        return super()._trackable_children(save_type, **options)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Read a whole layer."""
        super().load_own_variables(_Parts(store, self.variables))  # type: ignore[misc]


class _Parts(Mapping[str, Any]):
    """A file's values for one layer, by their numbers, of which this rank takes its parts."""

    def __init__(self, store: Any, variables: Sequence[Any]) -> None:
        self._store, self._variables = store, variables

    def __getitem__(self, key: str) -> Any:
        value = self._store[key]
        return own_of(self._variables[int(key)], value) if key.isdigit() else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.keys())

    def __len__(self) -> int:
        return len(self._store.keys())


def _whole_state(optimizer: Any) -> tuple[dict[str, Array], dict[str, list[Array | None]]]:
    singles, lists = state_of(optimizer)
    weights = optimizer._trainable_variables
    return singles, {
        name: [
            None if value is None else whole_of(weight, value) for weight, value in zip(weights, values, strict=True)
        ]
        for name, values in lists.items()
    }
