"""Horovod's callbacks for a training loop such as Keras' `fit`, without a framework.

These classes have no base. An adapter's class derives from one of them and then from its framework's Callback, so that
`super()` calls the framework's method. They rely only on the attributes `model` and `params`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import MismatchError, UsageError
from commlib.horovod.basics import rank
from commlib.horovod.operations import allgather_object


def extract_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of `logs` that can be averaged."""
    numbers = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            numbers[name] = float(value)
    return numbers


def average_metrics(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over ranks. Raises MismatchError if ranks have different metrics."""
    for number, theirs in enumerate(everyone):
        if theirs.keys() != everyone[0].keys():
            raise MismatchError(
                f"MetricAverageCallback: rank 0 has the metrics {sorted(everyone[0])}, but rank {number} "
                f"{sorted(theirs)}: validate on all ranks or on none"
            )
    return {name: sum(theirs[name] for theirs in everyone) / len(everyone) for name in sorted(everyone[0])}


class MetricAverage:
    """Replace each metric by its average over ranks at the end of every epoch, for the callbacks after this one.

    Put it before callbacks that decide by metrics, such as ReduceLROnPlateau or EarlyStopping: all ranks then decide
    the same. Every rank has equal weight, regardless of its number of samples. Collective. `device` has no effect.
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the numbers in `logs`. Raises MismatchError on every rank if ranks have different metrics."""
        logs = {} if logs is None else logs
        everyone = allgather_object(extract_numbers(logs), "MetricAverage", self._process_set)
        logs.update(average_metrics(everyone))


class BestModel:
    """Save the model to `filepath` whenever `monitor` reaches a new best value. Only rank 0 writes.

    All ranks have the same model, but `monitor` is rank 0's local value unless a MetricAverageCallback comes first.
    `filepath` may be set later, but before `fit`.
    """

    filepath: Any

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            filepath="unset.keras" if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=False,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that `filepath` is set."""
        if self.filepath is None:
            raise UsageError("BestModelCheckpoint: pass filepath, or set the attribute before fit()")
        super().on_train_begin(logs)  # type: ignore[misc]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save on rank 0, if a save is due."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0, if a save is due."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]


class CommitState:
    """Commit `state` after every `batches_per_commit` batches, and at the end of every epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if not hasattr(state, "commit"):
            raise UsageError(f"{type(self).__name__}: expected an elastic state, got {type(state).__name__}")
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Restart the count: all ranks must commit at the same time."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if a commit is due."""
        self._batches += 1
        if self._batches >= self.batches_per_commit:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit at the end of an epoch, regardless of earlier commits."""
        self._commit()

    def _commit(self) -> None:
        self._batches = 0
        self.state.commit()


class UpdateBatchState:
    """Set `state.batch` to the number of finished batches of this epoch; 0 when the epoch has ended.

    After a restart within an epoch `fit` counts from 0 again: the batches finished before are added. Put it before
    CommitStateCallback.
    """

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the batches finished before the restart."""
        self._done = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self.state.batch = self._done + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the count."""
        self.state.batch = 0


class UpdateEpochState:
    """Set `state.epoch` to the number of finished epochs, over all restarts of `fit`.

    Works where `fit` counts from 0 after a restart, with `epochs=total - state.epoch`, and where it gets
    `initial_epoch=state.epoch`. Put it before CommitStateCallback.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget the epochs of an earlier run."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the first epoch of `fit`."""
        if self._before is None:
            self._before, self._first = self.state.epoch, epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        assert self._before is not None
        self.state.epoch = self._before + (epoch - self._first) + 1
