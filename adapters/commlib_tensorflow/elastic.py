"""Elastic state, committed and restored in memory: TensorFlow variables, and Keras models and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.horovod.elastic import ObjectState, State
from commlib.horovod.elastic import run as run_core
from commlib.horovod.elastic import run_fn as run_fn_core
from commlib.horovod.exceptions import HostsUpdatedInterrupt
from commlib_tensorflow._graph_errors import find_program_error, graph_errors
from commlib_tensorflow._keras_optimizers import between_passes, build, give_up_passes, variables_of
from commlib_tensorflow.broadcast import broadcast_object, broadcast_variables
from commlib_tensorflow.expert.rebalance import owners_of, put_owners

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
]


class _VariablesKeeper:
    """Saves and restores the variables that `current` returns."""

    def __init__(self, current: Callable[[], list[Any]]) -> None:
        self._current = current
        self.save()

    def save(self) -> None:
        self.values = [np.array(tf.convert_to_tensor(variable)) for variable in self._current()]

    def restore(self) -> None:
        for variable, value in zip(self._current(), self.values, strict=False):
            variable.assign(value)

    def sync(self) -> None:
        broadcast_variables(self._current(), root_rank=0)
        self.save()

    def reset(self) -> None:
        pass


class _ExpertsKeeper:
    """Saves and restores the placement of a model's experts; their weights are saved separately.

    Restoring is collective.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.save()

    def save(self) -> None:
        self._owners = owners_of(self._model)

    def restore(self) -> None:
        put_owners(self._model, self._owners)

    def sync(self) -> None:
        self.save()

    def reset(self) -> None:
        pass


class TensorFlowState(ObjectState):
    """Variables, and attributes of any picklable kind: `TensorFlowState(model.variables, epoch=0)`."""

    def __init__(self, variables: Iterable[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, **kwargs)
        self.variables = [] if variables is None else list(variables)
        self._variables_keeper = self._keepers[""] = _VariablesKeeper(self._current)

    def _current(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer (by default its own from `compile`), and further attributes."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        # Otherwise the optimizer's variables would be created later, on some ranks only after others have saved.
        build(model, self.optimizer)
        super().__init__(None, **kwargs)
        self._keepers["experts of the model"] = _ExpertsKeeper(model)

    def _current(self) -> list[Any]:
        # Not the model's other variables: ranks need different seeds and metrics.
        return [*self.model.weights, *variables_of(self.optimizer)]

    def between_passes(self) -> bool:
        """Return whether the optimizer has accumulated gradients since its last update."""
        return between_passes(self.optimizer)

    def restore(self) -> None:
        """Restore the model, optimizer and attributes from the last save. The next pass is a first one.

        Raises RuntimeError if the number of variables has changed.
        """
        saved, current = len(self._variables_keeper.values), len(self._current())
        if saved != current:
            raise RuntimeError(
                f"the model and optimizer have {current} variables but had {saved} when they were saved: build the "
                "model before the state, and commit after adding variables"
            )
        super().restore()
        give_up_passes(self.optimizer)

    def reset(self) -> None:
        """Prepare for a restart: gradients accumulated over passes differ between ranks, and are discarded."""
        super().reset()
        give_up_passes(self.optimizer)


def run(func: Callable[..., Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Decorate `func(state, ...)`: before it runs, all ranks take rank 0's state; see `commlib.horovod.elastic`.

    If an operation fails within a traced function, its original error counts, not TensorFlow's error for it. The same
    holds for a HorovodInternalError, or another error of commlib, that the program raises in a `tf.py_function`.
    """
    return run_core(_restore_errors(func), attempts=attempts)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Return `func(state, ...)` decorated as by `run`; `reset()` is called before each retry."""
    return run_fn_core(_restore_errors(func), reset, attempts=attempts)


def _restore_errors(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def converted(*arguments: Any, **options: Any) -> Any:
        try:
            return func(*arguments, **options)
        except tf.errors.OpError as error:
            original = graph_errors.original(error) or find_program_error(error)
            if original is None:
                raise
            raise original from error

    return converted
