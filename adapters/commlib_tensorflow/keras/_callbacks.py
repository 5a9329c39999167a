"""Horovod's callbacks for Keras 2 and 3: `commlib.horovod.callbacks`, derived from the Callback class of each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from commlib import horovod as core
from commlib.errors import UsageError
from commlib.horovod import callbacks as bodies
from commlib.horovod.learning_rate import LearningRateSchedule, LearningRateWarmup
from commlib_tensorflow import _keras_optimizers as optimizers
from commlib_tensorflow._keras_optimizers import build, variables_of
from commlib_tensorflow._keras_reduction import key_of
from commlib_tensorflow.broadcast import broadcast_variables
from commlib_tensorflow.keras._preemption import PreemptedFit
from commlib_tensorflow.pipelines._updates import local_state_of


class BroadcastGlobalVariables:
    """Broadcast the weights and the optimizer's state of rank `root_rank` to all ranks when training begins.

    Before the first batch, if all ranks have created all variables by then (Keras 3 always has; Keras 2 if the model's
    input shape is known); otherwise after the first batch. `local_variables` are not changed, nor are seeds and
    metrics. Collective; once for a model, and again when the callback is used for another one. `device` has no effect.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._last: weakref.ref[Any] | None = None  # the last model that was broadcast
        try:
            self._local = {key_of(variable) for variable in local_variables or ()}
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"{type(self).__name__}: local_variables is {local_variables!r:.80}, expected variables"
            ) from error

    @property
    def broadcast_done(self) -> bool:
        """Whether the current model has been broadcast."""
        return self._last is not None and self._last() is self.model

    def register_local_var(self, variable: Any) -> None:
        """Exclude `variable` from the broadcast."""
        self._local.add(key_of(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if all ranks are ready."""
        if not self.broadcast_done and all(core.allgather_object(build(self.model), "BroadcastGlobalVariables")):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch, if that was impossible before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.weights, *variables_of(optimizer)]
        local = self._local | set(map(key_of, local_state_of(optimizer)))
        broadcast_variables([v for v in variables if key_of(v) not in local], root_rank=self.root_rank)
        self._last = weakref.ref(self.model)


_BODIES: dict[str, tuple[type, str]] = {
    "BroadcastGlobalVariablesCallback": (BroadcastGlobalVariables, "Callback"),
    "MetricAverageCallback": (bodies.MetricAverage, "Callback"),
    "LearningRateScheduleCallback": (LearningRateSchedule, "Callback"),
    "LearningRateWarmupCallback": (LearningRateWarmup, "Callback"),
    "BestModelCheckpoint": (bodies.BestModel, "ModelCheckpoint"),
    "CommitStateCallback": (bodies.CommitState, "Callback"),
    "UpdateBatchStateCallback": (bodies.UpdateBatchState, "Callback"),
    "UpdateEpochStateCallback": (bodies.UpdateEpochState, "Callback"),
    "PreemptionCallback": (PreemptedFit, "Callback"),
}


def of(keras: Any) -> SimpleNamespace:
    """Return the callbacks, and those of `commlib_tensorflow.keras.elastic`, for `keras` or `tf_keras`."""
    classes = {name: _derive(body, getattr(keras.callbacks, base), name) for name, (body, base) in _BODIES.items()}
    return SimpleNamespace(**classes)


def _derive(body: type, base: type, name: str) -> type:
    """Return a class `name` with the behaviour of `body`, derived from a callback class of Keras."""
    module = "commlib_tensorflow.keras.callbacks"

    def set_model(self: Any, model: Any) -> None:
        """Set the model that is trained."""
        if _is_of_keras2(type(model)) and not _is_of_keras2(base):
            raise UsageError(
                f"{name}: this is a model of tf_keras, but Keras 3 is in use: set TF_USE_LEGACY_KERAS=1 before "
                "TensorFlow is imported, or take the callbacks from commlib_tensorflow.keras.callbacks.of(tf_keras)"
            )
        super(derived, self).set_model(model)

    own = {"__doc__": body.__doc__, "__module__": module, "optimizers": optimizers, "set_model": set_model}
    derived: Any = type(name, (body, base), own)
    return derived  # type: ignore[no-any-return]


def _is_of_keras2(kind: type) -> bool:
    return any(base.__module__.startswith("tf_keras.") for base in kind.__mro__)
