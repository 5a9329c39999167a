"""Callbacks of Horovod for a training loop like Keras' `fit`, without a framework.

The classes here have no base. An adapter derives from them and from its framework's Callback, in this order, which
`super()` then means; they rely on nothing of it but `model` and `params`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import MismatchError, UsageError
from commlib.horovod.basics import rank
from commlib.horovod.operations import allgather_object


def numbers_in(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return those of `logs` that can be averaged."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


def average_metrics(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over ranks. Raises MismatchError if they do not have the same ones."""
    for number, theirs in enumerate(everyone):
        if theirs.keys() != everyone[0].keys():
            raise MismatchError(
                f"MetricAverageCallback: rank 0 has the metrics {sorted(everyone[0])}, but rank {number} "
                f"{sorted(theirs)}: validate on all ranks or on none"
            )
    return {name: sum(theirs[name] for theirs in everyone) / len(everyone) for name in sorted(everyone[0])}


class MetricAverage:
    """Replace each metric by its average over ranks at the end of every epoch, for the callbacks that come after.

    So it belongs before callbacks that decide by metrics, such as ReduceLROnPlateau or EarlyStopping: ranks then decide
    alike. Every rank counts the same, whatever its number of samples. Collective. `device` means nothing here.
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the numbers in `logs`. Raises MismatchError on every rank if they are not the same ones."""
        logs = {} if logs is None else logs
        everyone = allgather_object(numbers_in(logs), "MetricAverage", self._process_set)
        logs.update(average_metrics(everyone))


class BestModel:
    """Save the model, to `filepath`, whenever `monitor` is better than ever before. Rank 0 writes, the others do not.

    All ranks have the same model, but `monitor` is rank 0's own unless a MetricAverageCallback comes before.
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
        """Check that it is known where to save."""
        if self.filepath is None:
            raise UsageError("BestModelCheckpoint: pass filepath, or set the attribute before fit()")
        super().on_train_begin(logs)  # type: ignore[misc]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]


class CommitState:
    """Commit `state` after every `batches_per_commit` batches, and at the end of every epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count anew: all ranks must commit at the same time."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is time."""
        self._batches += 1
        if self._batches >= self.batches_per_commit:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit: another epoch has ended, whatever was committed before."""
        self._commit()

    def _commit(self) -> None:
        self._batches = 0
        self.state.commit()


class UpdateBatchState:
    """Keep `state.batch` the number of batches of this epoch that are done; 0 when it has ended.

    After a restart within an epoch `fit` counts from 0 again: what was done before is added. Put it before
    CommitStateCallback.
    """

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note what was done of this epoch before."""
        self._done = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.state.batch = self._done + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochState:
    """Keep `state.epoch` the number of epochs that are done, however often `fit` was restarted.

    Works where `fit` counts from 0 after a restart, with `epochs=total - state.epoch`, and where it gets
    `initial_epoch=state.epoch`. Put it before CommitStateCallback.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Note what was done before."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note from where `fit` counts."""
        if self._before is None:
            self._before, self._first = self.state.epoch, epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        assert self._before is not None
        self.state.epoch = self._before + (epoch - self._first) + 1
