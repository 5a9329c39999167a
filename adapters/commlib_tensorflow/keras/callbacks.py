"""Callbacks for `fit`: Horovod's, and one that handles signals, for the Keras version that `tf.keras` is.

TF_USE_LEGACY_KERAS=1 decides between the two versions.

`of(tf_keras)` returns the callbacks for the other version, which may be used in the same program.
"""

from __future__ import annotations

import tensorflow as tf

from commlib_tensorflow.keras._callbacks import of

_made = of(tf.keras)
BroadcastGlobalVariablesCallback = _made.BroadcastGlobalVariablesCallback
MetricAverageCallback = _made.MetricAverageCallback
LearningRateScheduleCallback = _made.LearningRateScheduleCallback
LearningRateWarmupCallback = _made.LearningRateWarmupCallback
BestModelCheckpoint = _made.BestModelCheckpoint
CommitStateCallback = _made.CommitStateCallback
UpdateBatchStateCallback = _made.UpdateBatchStateCallback
UpdateEpochStateCallback = _made.UpdateEpochStateCallback
PreemptionCallback = _made.PreemptionCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "BestModelCheckpoint",
    "PreemptionCallback",
    "of",
]
