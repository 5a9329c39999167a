"""Callbacks for `fit`: Horovod's, and one that handles signals, for the Keras version that `tf.keras` is.

TF_USE_LEGACY_KERAS=1 decides between the two versions.

`of(tf_keras)` returns the callbacks for the other version, which may be used in the same program.
"""

from __future__ import annotations

import typing as _typing

import tensorflow as tf

from commlib.arguments import missing_attribute as _missing_attribute
from commlib_tensorflow.keras._callbacks import of

_classes = of(tf.keras)
BroadcastGlobalVariablesCallback = _classes.BroadcastGlobalVariablesCallback
MetricAverageCallback = _classes.MetricAverageCallback
LearningRateScheduleCallback = _classes.LearningRateScheduleCallback
LearningRateWarmupCallback = _classes.LearningRateWarmupCallback
BestModelCheckpoint = _classes.BestModelCheckpoint
CommitStateCallback = _classes.CommitStateCallback
UpdateBatchStateCallback = _classes.UpdateBatchStateCallback
UpdateEpochStateCallback = _classes.UpdateEpochStateCallback
PreemptionCallback = _classes.PreemptionCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "BestModelCheckpoint",
    "PreemptionCallback",
    "of",
]

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
