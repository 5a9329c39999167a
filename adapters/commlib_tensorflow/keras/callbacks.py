"""Horovod's callbacks for `fit`, for the Keras that `tf.keras` is: TF_USE_LEGACY_KERAS=1 decides between the two.

Who uses the other one beside it finds its callbacks by `of(tf_keras)`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from commlib_tensorflow import _keras_callbacks as bodies

_BODIES: dict[str, tuple[type, str]] = {
    "BroadcastGlobalVariablesCallback": (bodies.BroadcastGlobalVariables, "Callback"),
    "MetricAverageCallback": (bodies.MetricAverage, "Callback"),
    "LearningRateScheduleCallback": (bodies.LearningRateSchedule, "Callback"),
    "LearningRateWarmupCallback": (bodies.LearningRateWarmup, "Callback"),
    "BestModelCheckpoint": (bodies.BestModel, "ModelCheckpoint"),
    "CommitStateCallback": (bodies.CommitState, "Callback"),
    "UpdateBatchStateCallback": (bodies.UpdateBatchState, "Callback"),
    "UpdateEpochStateCallback": (bodies.UpdateEpochState, "Callback"),
}


def of(keras: Any) -> SimpleNamespace:
    """Return the callbacks, and those of `commlib_tensorflow.keras.elastic`, for `keras` or `tf_keras`."""
    made = {name: bodies.derive(body, getattr(keras.callbacks, base), name) for name, (body, base) in _BODIES.items()}
    return SimpleNamespace(**made)


_made = of(tf.keras)
BroadcastGlobalVariablesCallback = _made.BroadcastGlobalVariablesCallback
MetricAverageCallback = _made.MetricAverageCallback
LearningRateScheduleCallback = _made.LearningRateScheduleCallback
LearningRateWarmupCallback = _made.LearningRateWarmupCallback
BestModelCheckpoint = _made.BestModelCheckpoint
CommitStateCallback = _made.CommitStateCallback
UpdateBatchStateCallback = _made.UpdateBatchStateCallback
UpdateEpochStateCallback = _made.UpdateEpochStateCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "BestModelCheckpoint",
    "of",
]
