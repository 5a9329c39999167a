"""Learning rates: follow a schedule or warm up, in a training loop such as Keras' `fit`. See `callbacks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from commlib.errors import UsageError
from commlib.horovod.basics import rank, size


class Optimizers(Protocol):
    """Access to a framework's optimizers. A learning rate is set as the attribute `learning_rate`."""

    def learning_rate_of(self, optimizer: Any) -> float:
        """Return the learning rate as a number."""
        ...

    def momentum_of(self, optimizer: Any) -> list[Any]:
        """Return the variables of momentum, which hold past gradients times past learning rates; they have `assign`."""
        ...


def warmup_factor(done: float, warmup_epochs: float, ranks: int) -> float:
    """Return the fraction of the full learning rate after `done` epochs: from 1 / `ranks` up to 1.

    The batch about to run counts as done, so that each epoch ends with a round number.
    """
    return (1 + min(1.0, done / warmup_epochs) * (ranks - 1)) / ranks


def _read_number(what: str, given: Any, otherwise: str = "") -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        raise UsageError(f"{what} is {given!r}, expected a number{otherwise}") from None


class LearningRateSchedule:
    """Set the learning rate to `initial_lr * multiplier(epoch)` in epochs from `start_epoch` to before `end_epoch`.

    With `staircase` it is set at the beginning of each epoch, else in each batch, with fractions of epochs of
    `steps_per_epoch` batches (determined automatically if None). `multiplier` may be a number. `momentum_correction`
    scales the momentum of SGD and RMSprop, which holds past gradients times past learning rates, with the learning rate
    (Goyal et al., 2017). `fit` reports the learning rate as "lr".
    """

    model: Any
    params: dict[str, Any]
    optimizers: Optimizers
    """Set by the adapter's class."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr is missing: the learning rate that the multiplier multiplies")
        what = type(self).__name__
        self.initial_lr = _read_number(f"{what}: initial_lr", initial_lr)
        counts = {"start_epoch": start_epoch, "end_epoch": end_epoch, "steps_per_epoch": steps_per_epoch}
        for name, count in counts.items():
            if count is not None:
                _read_number(f"{what}: {name}", count)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.staircase, self.multiplier = staircase, multiplier
        else:
            constant = _read_number(f"{what}: multiplier", multiplier, " or a function of the epoch")
            self.staircase, self.multiplier = True, lambda epoch: constant

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of batches in an epoch, if it is needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"{type(self).__name__}: the number of batches in an epoch is unknown before the first one has "
                    "ended: pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate."""
        after = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or after:
            return
        if self.staircase:
            if batch == 0:
                self._set(self.current_epoch)
        else:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the learning rate."""
        if logs is not None:
            logs["lr"] = self.optimizers.learning_rate_of(self.model.optimizer)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = self.optimizers.learning_rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        if old == new:
            return
        try:
            optimizer.learning_rate = new
        except TypeError as error:
            raise UsageError(f"{type(self).__name__} cannot set the learning rate of the optimizer: {error}") from error
        if self.momentum_correction and old > 0:
            for momentum in self.optimizers.momentum_of(optimizer):
                momentum.assign(momentum * (new / old))


class LearningRateWarmup(LearningRateSchedule):
    """Raise the learning rate from `initial_lr / size` to `initial_lr` over the first `warmup_epochs`, batch by batch.

    `initial_lr` is the rate for all ranks together. `steps_per_epoch` is determined automatically if None. With
    `verbose` rank 0 prints the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        _read_number(f"{type(self).__name__}: warmup_epochs", warmup_epochs)

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            return warmup_factor(epoch + 1 / self.steps_per_epoch, warmup_epochs, size())

        self.verbose = verbose
        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch=steps_per_epoch
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the learning rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = self.optimizers.learning_rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
