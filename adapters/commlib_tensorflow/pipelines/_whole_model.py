"""Uncut model: rebuild it as an ordinary Keras model, to read and write files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow._shards import own_of, shard_of, whole_of, whole_shape
from commlib_tensorflow.pipelines._optimizer_state import OptimizerState, put_states


class WholeModel:
    """The model before it was split: its configuration, its variables in their order, and their ranks.

    parts, placement: its stages and their ranks. Variables that no stage has, because no operation uses them, are kept
    on every rank.
    """

    def __init__(self, model: Any, parts: Sequence[Any], placement: Sequence[int]) -> None:
        self.name = model.name
        self._layers = {type(layer).__name__: type(layer) for layer in _layers_of(model)}
        self.model = model
        """The whole model itself."""
        owners: dict[int, int] = {}
        for part, rank in zip(parts, placement, strict=True):
            for variable in part.variables:
                owners.setdefault(id(variable), rank)
        self._owners = [owners.get(id(variable)) for variable in model.variables]
        self._specs = [(whole_shape(v), tf.as_dtype(v.dtype).as_numpy_dtype) for v in model.variables]
        shards = [shard for v in model.variables if (shard := shard_of(v)) is not None]
        self._writes = all(shard.axis.rank == 0 for shard in shards)  # one of the ranks with the same stages writes
        own = {id(variable): variable for part in parts for variable in part.variables}
        self._own: list[Any] = [own.get(id(v), v if id(v) not in owners else None) for v in model.variables]
        self.order = {id(variable): place for place, variable in enumerate(model.variables)}
        self._weights = [self.order[id(weight)] for weight in model.weights]
        self.is_weight = [place in set(self._weights) for place in range(len(self._own))]

    @property
    def variables(self) -> list[Any]:
        """The variables of the whole model; only those of this rank's stages have current values."""
        return list(self.model.variables)

    def values(self, comm: Communicator) -> Iterator[Array]:
        """Yield the values of all variables, on every rank, one at a time. Collective."""
        for variable, owner, (shape, dtype) in zip(self._own, self._owners, self._specs, strict=True):
            if owner is None:
                yield whole_of(variable, np.array(to_array(tf.convert_to_tensor(variable.value))))
                continue
            array = np.empty(shape, dtype)
            if comm.rank == owner:
                array[...] = whole_of(variable, to_array(tf.convert_to_tensor(variable.value)))
            comm.broadcast(array, owner)
            yield array

    def weights(self, comm: Communicator) -> list[Array]:
        """Return the values of the model's weights, in its order, on every rank. Collective."""
        values = list(self.values(comm))
        return [values[place] for place in self._weights]

    @property
    def count(self) -> int:
        """The number of the model's weights."""
        return len(self._weights)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The unsharded shapes of the model's weights, in its order."""
        return [self._specs[place][0] for place in self._weights]

    def pairs(self, weights: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Pair this rank's weights with their values, given the values of all the model's weights, in its order."""
        own = ((self._own[place], value) for place, value in zip(self._weights, weights, strict=True))
        return [(variable, own_of(variable, value)) for variable, value in own if variable is not None]

    def built(self) -> Any:
        """Return a copy of the whole model, with newly initialised weights. Not collective.

        Raises UsageError if the model cannot be made from its configuration.
        """
        try:
            config: Any = keras.saving.serialize_keras_object(self.model)  # with the current `trainable` flags
        except Exception as error:
            raise UsageError(
                f"pipeline: the configuration of {self.name!r} is not available ({type(error).__name__}: "
                f"{error}), so the whole model cannot be rebuilt: give its layers a get_config()"
            ) from error
        config.pop("compile_config", None)
        model = keras.saving.deserialize_keras_object(config, custom_objects=self._layers, safe_mode=False)
        specs = [(tuple(v.shape), tf.as_dtype(v.dtype).as_numpy_dtype) for v in model.variables]
        if specs != self._specs:
            raise UsageError(
                f"pipeline: {self.name!r} has different variables when rebuilt from its configuration: "
                f"{len(specs)} of shapes {[shape for shape, _ in specs]}, expected {len(self._specs)} of shapes "
                f"{[shape for shape, _ in self._specs]}: check get_config() of its layers"
            )
        return model

    def take(self, model: Any, mine: Mapping[int, Any]) -> None:
        """Assign the values in a copy of the whole model to this rank's variables, given by their id."""
        for variable, other in zip(self._own, model.variables, strict=True):
            if variable is not None and id(variable) in mine:
                variable.assign(own_of(variable, other.value))

    def write(self, comm: Communicator, write: Callable[[Any], None]) -> None:
        """Let rank 0 write a copy of the whole model with the weights of all ranks, while the others wait.

        Collective. Rank 0 raises the error of `write`, the others a UsageError that quotes it.
        """
        raised: Exception | None = None
        model: Any = None
        try:
            model = self.built() if comm.rank == 0 and self._writes else None
        except Exception as error:
            raised = error
        for place, value in enumerate(self.values(comm)):
            if model is not None:
                model.variables[place].assign(value)
        try:
            if model is not None:
                write(model)
        except Exception as error:
            raised = error
        text = comm.broadcast_object("" if raised is None else f"{type(raised).__name__}: {raised}", 0)
        if raised is not None:
            raised.add_note("commlib: rank 0 writes the whole model of a pipeline")
            raise raised
        if text:
            raise UsageError(f"rank 0 could not write the whole model: {text}")

    def put_optimizer_state(self, model: Any, states: Sequence[OptimizerState]) -> None:
        """Load the optimizer state of all ranks into a copy of the whole model, if there is any."""
        if states:
            model.optimizer.build(model.trainable_variables)
            put_states(model.optimizer, states, {id(v): place for place, v in enumerate(model.variables)})


def _layers_of(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers_of(layer)
