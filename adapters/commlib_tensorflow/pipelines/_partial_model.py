"""PartialModel: a Keras model on one rank that is a part of a whole model, in whose name it reads and writes files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import keras
import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.pipeline.pipe import Pipe
from commlib_tensorflow._shards import whole_of
from commlib_tensorflow.pipelines._optimizer_state import put_states, rebuild_optimizer, states_of
from commlib_tensorflow.pipelines._whole_model import WholeModel


def share_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method: an error on one rank is sent to all ranks."""

    @wraps(method)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        with self.pipe.together():
            return method(self, *args, **options)

    return wrapper


def report_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method: an error between batches, such as a callback's, is also sent to all ranks."""

    @wraps(method)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        with self.pipe.reporting_errors(method.__name__):
            return method(self, *args, **options)

    return wrapper


@dataclass(slots=True)
class ModelPart:
    """The part of a model, hidden from Keras. variables: those of this rank, by their id."""

    pipe: Pipe
    whole: WholeModel
    variables: Mapping[int, Any]


class PartialModel(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that is a part of a whole one: its files have the whole model, and it refuses what a part cannot do."""

    def __init__(self, name: str, part: ModelPart) -> None:
        super().__init__(name=name)
        self._part = part

    @property
    def pipe(self) -> Pipe:
        """Runs the schedule."""
        return self._part.pipe

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **options: Any) -> None:
        """Write the whole model to a file that `keras.models.load_model` reads, with or without commlib.

        The model in the file is compiled like this one, with the state of the optimizer. Rank 0 writes. Collective.
        """
        self._write(lambda model: model.save(filepath, overwrite=overwrite, zipped=zipped, **options))

    def save_weights(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        """Write the whole model's weights, as `keras.Model.save_weights` does. Rank 0 writes. Collective."""
        self._write(lambda model: model.save_weights(filepath, overwrite=overwrite, **options))

    @share_errors
    def _write(self, write: Callable[[Any], None]) -> None:
        """Let rank 0 write a copy of the whole model, compiled like this one, with the state of the optimizer."""
        own = states_of(self.optimizer, self._part.whole.order, whole_of)
        states = [state for states in self.pipe.comm.all_gather_object(own) for state in states]

        def compile_and_write(model: Any) -> None:
            if self.optimizer is not None:
                # With the same loss and metrics, which may be unregistered; the optimizer is rebuilt, as this one is
                # the rank's own.
                model.compile(**{**self._compile_config.config, "optimizer": rebuild_optimizer(self.optimizer)})
                self._part.whole.put_optimizer_state(model, states)
            write(model)

        self._part.whole.write(self.pipe.comm, compile_and_write)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **options: Any) -> None:
        """Read a whole model's weights, and keep those of this rank's stages. Every rank reads the file.

        As in Keras, a built optimizer loads its state from the file, if the file has any.
        """
        whole = self._part.whole
        model = whole.built()
        if skip_mismatch:  # skipped weights keep their values
            for variable, value in zip(model.variables, whole.values(self.pipe.comm), strict=True):
                variable.assign(value)
        takes_state = self.optimizer is not None and self.optimizer.built
        if takes_state:
            model.compile(rebuild_optimizer(self.optimizer), jit_compile=False)
            model.optimizer.build(model.trainable_variables)
            model.optimizer.iterations.assign(-1)  # stays -1 if the file has no state
        model.load_weights(filepath, skip_mismatch=skip_mismatch, **options)
        whole.take(model, self._part.variables)
        if takes_state and int(model.optimizer.iterations) >= 0:
            places = {id(variable): place for place, variable in enumerate(model.variables)}
            put_states(self.optimizer, states_of(model.optimizer, places, lambda _, value: value), whole.order)

    @share_errors
    def gather_weights(self) -> list[Array]:
        """Return the weights of the whole model, in the order of its `weights`, on every rank. Collective."""
        return self._part.whole.weights(self.pipe.comm)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set this rank's weights: from the values of `get_weights`, or from those of the whole model.

            pipe.set_weights(pipe.get_weights()); pipe.set_weights(pipe.gather_weights())

        If there are as many values as this rank has weights, they are this rank's, in the order of its `weights`;
        otherwise they are those of the whole model, in its order, and each rank takes its own. Not collective. Raises
        UsageError for other numbers of values or other shapes, before any weight changes.
        """
        own, whole = self.weights, self._part.whole
        if len(weights) == len(own):
            pairs = list(zip(own, weights, strict=True))
            shapes = [tuple(variable.shape) for variable in own]
        elif len(weights) == whole.count:
            pairs, shapes = whole.pairs(weights), whole.shapes
        else:
            raise UsageError(
                f"pipeline: set_weights: got {len(weights)} values; expected {len(own)} for this rank's stages "
                f"(get_weights), or {whole.count} for the whole model (gather_weights); this is rank "
                f"{self.pipe.comm.rank} of {self.pipe.comm.size}"
            )
        for number, (value, shape) in enumerate(zip(weights, shapes, strict=True)):
            if np.shape(value) != shape:
                raise UsageError(
                    f"pipeline: set_weights: value {number} has shape {np.shape(value)}, expected {shape}; this is "
                    f"rank {self.pipe.comm.rank} of {self.pipe.comm.size}"
                )
        for variable, value in pairs:
            variable.assign(value)

    # Refused

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be called: a batch goes through all ranks."""
        raise UsageError("a pipeline cannot be called: use fit, evaluate, predict or step(x, y), on every rank")

    def quantize(self, *args: Any, **options: Any) -> Any:
        """Refuse: this rank has only a part of the model, cut with unquantized layers."""
        raise UsageError("pipeline: quantize the whole model, before pipeline() cuts it into stages")

    def export(self, *args: Any, **options: Any) -> Any:
        """Refuse: this rank has only a part of the model."""
        raise UsageError(
            "a pipeline cannot be exported, because this rank has only a part of the model: save() writes the whole "
            "one, on all ranks; load that file with keras.models.load_model and export the result"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: this rank has only a part of the model, and others would not copy theirs."""
        raise UsageError(
            "a pipeline cannot be copied or pickled, because this rank has only a part of it. Keep the values of "
            "gather_weights() (or of save_weights(), a file), and load them into a pipeline made of another whole model"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse, like `__reduce_ex__`."""
        return self.__reduce_ex__(4)

    def get_config(self) -> Any:
        """Refuse: this rank has only a part of the model."""
        raise UsageError("a pipeline has no configuration: save() writes that of the whole model, on all ranks")
