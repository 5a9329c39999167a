"""Callbacks for fit: ranks stop together, and write and read one shared backup."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from typing import Any

import keras

from commlib.communicator import Communicator
from commlib.errors import UsageError


def share_callbacks(callbacks: Any, model: Any, agree_to_stop: Callable[[bool], bool]) -> Any:
    """Return the callbacks of a pipeline's `fit`, with those of this file added; a CallbackList stays one."""
    last, comm = StopAgreement(agree_to_stop), model.pipe.comm
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [*(_share_backup(one, comm) for one in keras.tree.flatten(callbacks) if one is not None), last]
    own = callbacks.callbacks
    own[:] = [*(_share_backup(one, comm) for one in own if not isinstance(one, StopAgreement)), last]
    callbacks.set_model(model)
    callbacks.set_params(callbacks.params)
    return callbacks


def _share_backup(callback: Any, comm: Communicator) -> Any:
    is_backup = type(callback) is keras.callbacks.BackupAndRestore
    return SharedBackup(callback, comm) if is_backup and comm.size > 1 else callback


class StopAgreement(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Stop all ranks after an epoch if any of them wants to stop. Runs last. Collective."""

    def __init__(self, agree_to_stop: Callable[[bool], bool]) -> None:
        super().__init__()
        self._agree_to_stop = agree_to_stop

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree whether to stop."""
        self.model.stop_training = self._agree_to_stop(bool(self.model.stop_training))


class _Follower(keras.callbacks.BackupAndRestore):  # type: ignore[misc]  # Keras has no types
    """Joins the collective calls that gather weights; only rank 0 writes files."""

    def _save_model(self) -> None:
        self.model.save_weights(filepath=self._weights_path, overwrite=True)


class SharedBackup(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Let rank 0 manage the files of a BackupAndRestore for all ranks; all of them read the weights."""

    def __init__(self, backup: Any, comm: Communicator) -> None:
        super().__init__()
        self._backup, self._comm = backup, comm
        if comm.rank:
            self._backup = copy(backup)
            self._backup.__class__ = _Follower

    def set_model(self, model: Any) -> None:
        """Set the model, which is the pipeline."""
        super().set_model(model)
        self._backup.set_model(model)

    def set_params(self, params: Any) -> None:
        """Set the parameters of `fit`."""
        super().set_params(params)
        self._backup.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Resume after an earlier fit, if there is a backup of it."""
        raised: Exception | None = None
        if self._comm.rank == 0:
            try:
                self._backup.on_train_begin(logs)
            except Exception as error:
                raised = error
        text = "" if raised is None else f"{type(raised).__name__}: {raised}"
        path, model = self._backup._weights_path, self.model
        exists, epoch, text = self._comm.broadcast_object((os.path.exists(path), model._initial_epoch, text))
        if raised is not None:
            raise raised
        if text:
            raise UsageError(f"BackupAndRestore: rank 0 could not read {self._backup.backup_dir!r}: {text}")
        if self._comm.rank and exists:
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        model._initial_epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save a backup if one is due."""
        self._backup.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save a backup if one is due."""
        self._backup.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Delete the backup, unless it is to be kept."""
        if self._comm.rank == 0:
            self._backup.on_train_end(logs)
