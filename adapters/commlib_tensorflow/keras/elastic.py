"""Elastic training with Keras: `KerasState`, `run`, and the callbacks that keep a state up to date."""

from __future__ import annotations

from typing import Any

from commlib_tensorflow.elastic import HostsUpdatedInterrupt, TensorFlowKerasState, run, run_fn
from commlib_tensorflow.keras.callbacks import _classes

CommitStateCallback = _classes.CommitStateCallback
UpdateBatchStateCallback = _classes.UpdateBatchStateCallback
UpdateEpochStateCallback = _classes.UpdateEpochStateCallback


class KerasState(TensorFlowKerasState):
    """A Keras model, its optimizer, and attributes of any picklable kind: `KerasState(model, batch=0, epoch=0)`."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)


__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]
