"""State that is committed and restored in memory: variables of TensorFlow, models and optimizers of Keras."""

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
from commlib_tensorflow._graph_errors import graph_errors, raised_by_program
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
    """Keeps the variables that `current` returns."""

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
    """Keeps where the experts of a model are, whose weights another one keeps. Collective to restore."""

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
        self._kept = self._keepers[""] = _VariablesKeeper(self._current)

    def _current(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(TensorFlowState):
    """A model of Keras, its optimizer (by default its own from `compile`), and further attributes."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        # Its variables would else appear later, and on some ranks only be there after others have saved.
        build(model, self.optimizer)
        super().__init__(None, **kwargs)
        self._keepers["experts of the model"] = _ExpertsKeeper(model)

    def _current(self) -> list[Any]:
        # Not the model's other variables: ranks need seeds and metrics of their own.
        return [*self.model.weights, *variables_of(self.optimizer)]

    def between_passes(self) -> bool:
        """Tell whether the optimizer has added up gradients since its last update."""
        return between_passes(self.optimizer)

    def restore(self) -> None:
        """Set the model, optimizer and attributes to what they were when they were saved. The next pass is a first one.

        Raises RuntimeError if there are other variables than then.
        """
        if len(self._kept.values) != len(self._current()):
            raise RuntimeError(
                f"the model and optimizer have {len(self._current())} variables but had {len(self._kept.values)} when "
                "they were saved: build the model before the state, and commit after adding variables"
            )
        super().restore()
        give_up_passes(self.optimizer)

    def reset(self) -> None:
        """Prepare for a restart: what passes have accumulated is each rank's own, and is given up."""
        super().reset()
        give_up_passes(self.optimizer)


def run(func: Callable[..., Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Decorate `func(state, ...)`: before it runs, the ranks take the state of rank 0; see `commlib.horovod.elastic`.

    An operation that fails within a traced function counts as what it raised there, not as TensorFlow's error for it.
    So does a HorovodInternalError, or another error of commlib, that the program raises in a `tf.py_function`.
    """
    return run_core(_raising_originals(func), attempts=attempts)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Return `func(state, ...)` as `run` does; `reset()` is called before each other call of it."""
    return run_fn_core(_raising_originals(func), reset, attempts=attempts)


def _raising_originals(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def converted(*arguments: Any, **options: Any) -> Any:
        try:
            return func(*arguments, **options)
        except tf.errors.OpError as error:
            original = graph_errors.original(error) or raised_by_program(error)
            if original is None:
                raise
            raise original from error

    return converted
