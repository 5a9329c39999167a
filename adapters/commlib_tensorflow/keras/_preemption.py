"""PreemptionCallback: `fit` that saves and exits on a signal, and resumes in the middle of an epoch."""

from __future__ import annotations

import os
from typing import Any

from commlib.errors import UsageError
from commlib.preemption import Preemption
from commlib_tensorflow.checkpoint import Checkpoint


class PreemptedFit:
    """Save the model and exit the program at the end of a batch, once any rank has got a signal. Collective.

        with commlib.Preemption() as preemption:
            leaving = ct.callbacks.PreemptionCallback(preemption, "run", model, steps_per_epoch=100)
            done = leaving.resume()
            model.fit(data.skip(done), initial_epoch=done // 100, steps_per_epoch=100, callbacks=[leaving, ...], ...)

    `resume` loads the folder's newest complete checkpoint, and returns the number of batches already trained, 0 if
    there is none. `data` must not end, and must have the same order in each run: `repeat()` it, and shuffle with a
    seed. A resumed epoch has only the remaining batches, and its logs cover only these. Put it before the other
    callbacks, whose own state (such as the patience of EarlyStopping) is not saved. With `steps_per_execution` signals
    take effect after that many batches. save_every: also save after every so many batches; 0: only on a signal. keep:
    see `Checkpoint`.
    """

    model: Any
    params: Any

    def __init__(
        self,
        preemption: Preemption,
        folder: str | os.PathLike[str],
        model: Any,
        steps_per_epoch: int,
        *,
        save_every: int = 0,
        keep: int = 2,
    ) -> None:
        super().__init__()
        if steps_per_epoch < 1 or save_every < 0:
            raise UsageError(
                f"PreemptionCallback: expected steps_per_epoch >= 1 and save_every >= 0, got {steps_per_epoch} and "
                f"{save_every}"
            )
        self._preemption, self._steps, self._save_every = preemption, steps_per_epoch, save_every
        self._checkpoint = Checkpoint(folder, keep=keep, model=model)
        self._done = self._saved = self._before = 0
        self._cuts = False

    def resume(self) -> int:
        """Load the newest complete checkpoint; return the number of batches already trained. Collective."""
        self._done = self._saved = self._checkpoint.resume()
        return self._done

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Check that `fit` continues at the right batch. Raises UsageError if not."""
        if self.params.get("steps") != self._steps or epoch != self._done // self._steps:
            raise UsageError(
                f"PreemptionCallback: {self._done} batches are done, of {self._steps} in an epoch: call fit with "
                f"initial_epoch={self._done // self._steps} and steps_per_epoch={self._steps}, not with epoch {epoch} "
                f"of {self.params.get('steps')} batches"
            )
        self._before = self._done

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save and exit if requested; end an epoch that an earlier run began."""
        self._done = self._before + batch + 1
        is_requested = self._preemption.requested()
        if is_requested or (self._save_every and self._done - self._saved >= self._save_every):
            self._checkpoint.save(self._done)
            self._saved = self._done
        if is_requested:
            self._preemption.leave()
        if self._before % self._steps and self._done % self._steps == 0:
            self.model.stop_training = self._cuts = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let `fit` continue with the next epoch."""
        if self._cuts:
            self.model.stop_training = self._cuts = False
