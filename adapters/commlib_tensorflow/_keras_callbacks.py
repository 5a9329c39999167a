"""What the callbacks for `fit` do, for either Keras: each is derived from the Callback of the Keras that it serves.

The classes here have no base. `derive` gives them that of a Keras; `super()` means that then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow._keras_reduction import key_of
from commlib_tensorflow.broadcast import broadcast_variables


class BroadcastGlobalVariables:
    """Give all ranks the weights and the optimizer's state of rank `root_rank` when training begins.

    Before the first batch, if all ranks have made all variables by then (Keras 3 always has; Keras 2 where the model
    knows the shape of its input); else after the first batch. `local_variables` are left as they are, and so are seeds
    and metrics. Collective; once in the life of the callback. `device` means nothing here.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {key_of(variable) for variable in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """Leave `variable` as it is on each rank."""
        self._local.add(key_of(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if all ranks can."""
        if not self.broadcast_done and all(core.allgather_object(build(self.model), "BroadcastGlobalVariables")):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch, if that was not possible before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        variables = [*self.model.weights, *variables_of(getattr(self.model, "optimizer", None))]
        broadcast_variables([v for v in variables if key_of(v) not in self._local], root_rank=self.root_rank)
        self.broadcast_done = True


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
        mine = {name: float(value) for name, value in logs.items() if is_number(value)}
        everyone = core.allgather_object(mine, "MetricAverage", self._process_set)
        for rank, theirs in enumerate(everyone):
            if theirs.keys() != everyone[0].keys():
                raise MismatchError(
                    f"MetricAverageCallback: rank 0 has the metrics {sorted(everyone[0])}, but rank {rank} "
                    f"{sorted(theirs)}: validate on all ranks or on none"
                )
        for name in sorted(mine):
            logs[name] = sum(theirs[name] for theirs in everyone) / len(everyone)


class LearningRateSchedule:
    """Set the learning rate to `initial_lr * multiplier(epoch)` in epochs from `start_epoch` to before `end_epoch`.

    With `staircase` at the beginning of each epoch, else in each batch, with fractions of epochs of `steps_per_epoch`
    batches (found out if None). `multiplier` may be a number. With `momentum_correction` the momentum of SGD and
    RMSprop, which holds past gradients times past learning rates, is scaled along (Goyal et al., 2017). `fit` reports
    the learning rate as "lr".
    """

    model: Any
    params: dict[str, Any]

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
            raise UsageError("initial_lr is needed: the learning rate that the multiplier multiplies")
        self.initial_lr = float(initial_lr)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.staircase, self.multiplier = staircase, multiplier
        else:
            constant = float(multiplier)
            self.staircase, self.multiplier = True, lambda epoch: constant

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out the number of batches in an epoch, where that is needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"{type(self).__name__}: the number of batches in an epoch is unknown before the first one has "
                    "ended: pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
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
            logs["lr"] = learning_rate_of(self.model.optimizer)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = learning_rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        if old == new:
            return
        try:
            optimizer.learning_rate = new
        except TypeError as error:
            raise UsageError(f"{type(self).__name__} cannot set the learning rate of the optimizer: {error}") from error
        if self.momentum_correction and old > 0:
            for momentum in momentum_of(optimizer):
                momentum.assign(momentum * (new / old))


class LearningRateWarmup(LearningRateSchedule):
    """Raise the learning rate from `initial_lr / size` to `initial_lr` over the first `warmup_epochs`, batch by batch.

    `initial_lr` is that for all ranks together. `steps_per_epoch` is found out if None. With `verbose` rank 0 prints
    when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch on, so that each epoch ends with a round number.
            assert self.steps_per_epoch is not None
            share = min(1.0, (epoch + 1 / self.steps_per_epoch) / warmup_epochs)
            return (1 + share * (core.size() - 1)) / core.size()

        self.verbose = verbose
        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch=steps_per_epoch
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the learning rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and core.rank() == 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = learning_rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


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
        if core.rank() == 0:
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time."""
        if core.rank() == 0:
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


def derive(body: type, base: type, name: str) -> type:
    """Return a class `name` that does what `body` does, derived from the Callback or so of a Keras."""
    return type(name, (body, base), {"__doc__": body.__doc__, "__module__": "commlib_tensorflow.keras.callbacks"})


def build(model: Any, optimizer: Any = None) -> bool:
    """Make the variables of an optimizer, by default the model's, if possible; say whether all variables are there."""
    if not model.built:
        return False
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    if optimizer is None or getattr(optimizer, "built", False):
        return True
    variables = model.trainable_variables
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:  # tf_keras.optimizers.legacy
        with tf.init_scope():
            optimizer._create_all_weights(variables)
    return True


def variables_of(optimizer: Any) -> list[Any]:
    """Return all state of an optimizer of either Keras that training changes, the loss scale included."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    if getattr(optimizer, "dynamic_counter", None) is not None:  # the LossScaleOptimizer of Keras 2
        found += [optimizer.dynamic_counter, optimizer._loss_scale.current_loss_scale]
    return found


def learning_rate_of(optimizer: Any) -> float:
    """Return the learning rate of an optimizer as a number."""
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def momentum_of(optimizer: Any) -> list[Any]:
    """Return the variables that hold momentum in the learning rate's unit: those of SGD and RMSprop."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    if not getattr(inner, "momentum", 0) or not kinds & {"SGD", "RMSprop"}:
        return []
    found = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None)
    if found is not None:
        return list(found)
    return [v for v in variables_of(inner) if "momentum" in v.name]  # tf_keras.optimizers.legacy


def is_number(value: Any) -> bool:
    """Say whether a value of `logs` can be averaged."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
