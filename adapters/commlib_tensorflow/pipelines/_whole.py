"""Whole: make the unsplit model again, as an ordinary Keras model, for files that are read and written."""

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
    """What a model was before it was cut: its configuration, its variables in their order, and where they are.

    parts, placement: its stages and their ranks. Variables that no stage has, because no operation uses them, are
    kept on every rank.
    """

    def __init__(self, model: Any, parts: Sequence[Any], placement: Sequence[int]) -> None:
        self.name = model.name
        self._layers = {type(layer).__name__: type(layer) for layer in _layers_of(model)}
        self.model = model
        """It itself."""
        owners: dict[int, int] = {}
        for part, rank in zip(parts, placement, strict=True):
            for variable in part.variables:
                owners.setdefault(id(variable), rank)
        self._owners = [owners.get(id(variable)) for variable in model.variables]
        self._specs = [(whole_shape(v), tf.as_dtype(v.dtype).as_numpy_dtype) for v in model.variables]
        shards = [shard for v in model.variables if (shard := shard_of(v)) is not None]
        self._writes = all(shard.axis.rank == 0 for shard in shards)  # of ranks with parts of the same, one
        own = {id(variable): variable for part in parts for variable in part.variables}
        self._own: list[Any] = [own.get(id(v), v if id(v) not in owners else None) for v in model.variables]
        self.order = {id(variable): place for place, variable in enumerate(model.variables)}
        self._weights = [self.order[id(weight)] for weight in model.weights]
        self.is_weight = [place in set(self._weights) for place in range(len(self._own))]

    @property
    def variables(self) -> list[Any]:
        """The variables of the unsplit model, of which only those of this rank's stages are kept as they should be."""
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
        found = list(self.values(comm))
        return [found[place] for place in self._weights]

    @property
    def count(self) -> int:
        """How many weights the model has."""
        return len(self._weights)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the model's weights, in its order, of divided ones those of the whole."""
        return [self._specs[place][0] for place in self._weights]

    def pairs(self, weights: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return this rank's weights, each with its value, given those of all of the model's, in its order."""
        own = ((self._own[place], value) for place, value in zip(self._weights, weights, strict=True))
        return [(variable, own_of(variable, value)) for variable, value in own if variable is not None]

    def built(self) -> Any:
        """Return a model like the unsplit one, with weights that are initialised anew. Not collective.

        Raises UsageError if the model cannot be made from its configuration.
        """
        try:
            config: Any = keras.saving.serialize_keras_object(self.model)  # with what is trainable now
        except Exception as error:
            raise UsageError(
                f"pipeline: the configuration of {self.name!r} could not be had ({type(error).__name__}: "
                f"{error}), so the whole model cannot be made again: give its layers a get_config()"
            ) from error
        config.pop("compile_config", None)
        model = keras.saving.deserialize_keras_object(config, custom_objects=self._layers, safe_mode=False)
        specs = [(tuple(v.shape), tf.as_dtype(v.dtype).as_numpy_dtype) for v in model.variables]
        if specs != self._specs:
            raise UsageError(
                f"pipeline: {self.name!r} has other variables when it is made from its configuration: "
                f"{len(specs)} of shapes {[shape for shape, _ in specs]}, expected {len(self._specs)} of shapes "
                f"{[shape for shape, _ in self._specs]}: check get_config() of its layers"
            )
        return model

    def take(self, model: Any, mine: Mapping[int, Any]) -> None:
        """Give this rank's variables, by their id, the values that they have in a model like the unsplit one."""
        for variable, other in zip(self._own, model.variables, strict=True):
            if variable is not None and id(variable) in mine:
                variable.assign(own_of(variable, other.value))

    def write(self, comm: Communicator, write: Callable[[Any], None]) -> None:
        """Let rank 0 write a model like the unsplit one, with the weights of all ranks, and the others wait for it.

        Collective. Raises what that raises on rank 0, and UsageError that says so on the others.
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
        """Give the optimizer of a model like the unsplit one what those of all ranks had, if they had anything."""
        if states:
            model.optimizer.build(model.trainable_variables)
            put_states(model.optimizer, states, {id(v): place for place, v in enumerate(model.variables)})


def _layers_of(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers_of(layer)
