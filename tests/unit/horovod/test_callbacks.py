"""Horovod's callbacks without a framework, called as by a training loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commlib.errors import MismatchError, UsageError
from commlib.horovod import callbacks, learning_rate
from commlib.horovod.callbacks import BestModel, CommitState, UpdateBatchState, UpdateEpochState
from commlib.horovod.learning_rate import LearningRateSchedule, LearningRateWarmup, warmup_factor

# Metrics


def test_only_numbers_are_averaged():
    logs = {"loss": 1, "acc": np.float32(0.5), "name": "kept", "list": [1], "none": None, "text": "0.5"}
    assert callbacks.extract_numbers(logs) == {"loss": 1.0, "acc": 0.5, "text": 0.5}


def test_metrics_are_averaged_over_ranks():
    everyone = [{"loss": 1.0, "acc": 0.0}, {"acc": 1.0, "loss": 4.0}, {"loss": 1.0, "acc": 0.5}]  # in any order
    assert callbacks.average_metrics(everyone) == {"loss": 2.0, "acc": 0.5}
    with pytest.raises(MismatchError, match=r"rank 0 has the metrics \['acc', 'loss'\], but rank 2 \['loss'\]"):
        callbacks.average_metrics([*everyone[:2], {"loss": 1.0}])


def test_averages_are_written_to_the_logs(monkeypatch):
    requests = []

    def gather(numbers, name, process_set):
        requests.append((numbers, name, process_set))
        return [numbers, {"loss": 3.0}]

    monkeypatch.setattr(callbacks, "allgather_object", gather)
    callback = callbacks.MetricAverage(process_set="some ranks")
    logs = {"loss": 1.0, "name": "kept"}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 2.0, "name": "kept"}
    assert requests == [({"loss": 1.0}, "MetricAverage", "some ranks")]


# The learning rate


class Weight:
    """A variable that holds momentum."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __mul__(self, factor: float) -> float:
        return self.value * factor

    def assign(self, value: float) -> None:
        self.value = value


class Rates:
    """Access to optimizers, as an adapter provides it."""

    def learning_rate_of(self, optimizer: Any) -> float:
        return float(optimizer.learning_rate)

    def momentum_of(self, optimizer: Any) -> list[Any]:
        return [optimizer.momentum]


def attached(callback: Any, steps: int | None = 4, rate: float = 1.0) -> Any:
    callback.optimizers, callback.params = Rates(), {"steps": steps}
    callback.model = SimpleNamespace(optimizer=SimpleNamespace(learning_rate=rate, momentum=Weight(8.0)))
    return callback


def rates(callback: Any, epochs: int = 4, steps: int = 4) -> list[float]:
    """The learning rate in each batch."""
    callback.on_train_begin()
    rates_ = []
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(steps):
            callback.on_train_batch_begin(batch)
            rates_.append(callback.model.optimizer.learning_rate)
        logs: dict[str, float] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs == {"lr": rates_[-1]}
    return rates_


def test_a_schedule_can_have_steps():
    schedule = attached(LearningRateSchedule(0.5, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3))
    assert rates(schedule) == [1.0] * 4 + [0.25] * 4 + [0.125] * 8


def test_a_schedule_can_change_in_each_batch():
    schedule = attached(LearningRateSchedule(2.0, lambda epoch: 1 / (1 + epoch), staircase=False))
    assert rates(schedule) == [2.0 / (1 + number / 4) for number in range(16)]


def test_a_schedule_of_a_number_is_a_staircase():
    schedule = attached(LearningRateSchedule(0.5, 0.5, start_epoch=2, staircase=False), steps=None)
    assert schedule.staircase
    assert rates(schedule) == [1.0] * 8 + [0.25] * 8


@pytest.mark.parametrize("correction", [True, False])
def test_momentum_follows_the_rate(correction):
    schedule = attached(LearningRateSchedule(1.0, lambda epoch: 0.5**epoch, momentum_correction=correction))
    rates(schedule, epochs=3)
    assert schedule.model.optimizer.momentum.value == (2.0 if correction else 8.0)


def test_a_rate_of_zero_does_not_change_momentum():
    schedule = attached(LearningRateSchedule(1.0, 0.5), rate=0.0)
    rates(schedule, epochs=1)
    assert (schedule.model.optimizer.learning_rate, schedule.model.optimizer.momentum.value) == (0.5, 8.0)


def test_the_warmup_factor_grows_to_1():
    """From the rate of one rank to the rate of all ranks."""
    assert [warmup_factor(done, 2, 4) for done in (0, 1, 2, 3)] == [0.25, 0.625, 1, 1]
    assert warmup_factor(0.5, 2, 1) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_warmup_raises_the_rate(monkeypatch, capsys, rank):
    monkeypatch.setattr(learning_rate, "size", lambda: 2)
    monkeypatch.setattr(learning_rate, "rank", lambda: rank)
    warmup = attached(LearningRateWarmup(1.0, warmup_epochs=2, verbose=1))
    assert rates(warmup) == [0.5 + (number + 1) / 16 for number in range(8)] + [1.0] * 8
    printed = "\nEpoch 2: finished gradual learning rate warmup to 1.\n" if rank == 0 else ""
    assert capsys.readouterr().out == printed


def test_wrong_schedules_are_refused():
    with pytest.raises(UsageError, match="initial_lr is missing"):
        LearningRateSchedule(None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"LearningRateWarmup: the number of batches .* pass steps_per_epoch"):
        attached(LearningRateWarmup(0.1), steps=None).on_train_begin()
    attached(LearningRateWarmup(0.1, steps_per_epoch=3), steps=None).on_train_begin()

    class Fixed:
        momentum = Weight(0.0)

        @property
        def learning_rate(self) -> float:
            return 1.0

        @learning_rate.setter
        def learning_rate(self, value: float) -> None:
            raise TypeError("it has a schedule of its own")

    schedule = attached(LearningRateSchedule(0.5, 0.5))
    schedule.model.optimizer = Fixed()
    with pytest.raises(UsageError, match=r"LearningRateSchedule cannot set .* it has a schedule of its own"):
        schedule.on_train_batch_begin(0)


# The best model


class Checkpoint:
    """The interface that BestModel expects of a framework's checkpoint."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[Any] = []
        self.filepath = options["filepath"]

    def on_train_begin(self, logs: Any) -> None:
        self.calls.append("begin")

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.calls.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.calls.append(f"epoch {epoch} {logs}")


class Best(BestModel, Checkpoint):
    pass


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_saves_the_best_model(monkeypatch, rank):
    monkeypatch.setattr(callbacks, "rank", lambda: rank)
    best: Any = Best("accuracy", mode="max", save_freq=7)
    with pytest.raises(UsageError, match="pass filepath"):
        best.on_train_begin()
    best.filepath = "somewhere"
    best.on_train_begin()
    best.on_train_batch_end(3)
    best.on_epoch_end(1, {"accuracy": 1})
    assert best.calls == ["begin", 3, "epoch 1 {'accuracy': 1}"][: 1 if rank else 3]
    assert (best.options["monitor"], best.options["mode"], best.options["save_freq"]) == ("accuracy", "max", 7)
    assert best.options["save_best_only"] and not best.options["save_weights_only"]
    assert Best(filepath="here").filepath == "here"


# Elastic states


class State(SimpleNamespace):
    """A state that counts commits."""

    commits = 0

    def commit(self) -> None:
        self.commits += 1


def run(callbacks: list[Any], epochs: list[int], batches: int) -> list[tuple[int, int, int]]:
    """Run a training loop; return batch, epoch and commits after each batch and epoch."""
    state, seen = callbacks[0].state, []
    callbacks[2].on_train_begin()
    callbacks[1].on_train_begin()
    for epoch in epochs:
        callbacks[0].on_epoch_begin(epoch)
        callbacks[1].on_epoch_begin(epoch)
        for number in range(batches):
            callbacks[0].on_train_batch_end(number)
            callbacks[2].on_train_batch_end(number)
            seen.append((state.batch, state.epoch, state.commits))
        for callback in callbacks:
            callback.on_epoch_end(epoch)
        seen.append((state.batch, state.epoch, state.commits))
    return seen


@pytest.mark.parametrize("first", [0, 5])
def test_states_continue_after_a_restart(first):
    """Two batches of epoch 5 were done; the loop counts batches from 0, and epochs from 0 or from 5."""
    state = State(batch=2, epoch=5)
    seen = run([UpdateBatchState(state), UpdateEpochState(state), CommitState(state, 2)], [first, first + 1], 3)
    assert seen == [(3, 5, 0), (4, 5, 1), (5, 5, 1), (0, 6, 2), (1, 6, 2), (2, 6, 3), (3, 6, 3), (0, 7, 4)]


def test_each_training_counts_its_own_commits():
    state = State()
    commit = CommitState(state, 2)
    for _ in range(3):
        commit.on_train_begin()
        commit.on_train_batch_end(0)
    assert state.commits == 0
