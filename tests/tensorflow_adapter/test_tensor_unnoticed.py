"""Side effects of checks: there are none. Lists once grew in the first call, and draws changed."""

from __future__ import annotations

import functools
import random
import warnings
from collections import UserDict
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import parallelize, verify

PLAN: Any = {"up": Column(), "down": Row()}


class Hostile(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that stores values in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = keras.layers.Dense(12, "relu", name="up"), keras.layers.Dense(8, name="down")
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3)
        self.calls, self.log, self.seen = 0, [0], {"calls": [0]}
        self.draws, self.number = np.random.default_rng(3), tf.Variable(0, trainable=False)

    def call(self, x: Any, training: Any = None) -> Any:
        self.calls += 1
        self.log.append(self.calls)
        self.seen["calls"].append(self.calls)
        self.seen[f"call {self.calls}"] = [1]
        self.draws.random()
        np.random.rand()
        random.random()
        self.number.assign_add(1)
        return self.drop(self.down(self.up(self.norm(x, training=training))), training=training)


def kept(model: Any) -> dict[str, Any]:
    return {
        "calls": (model.calls, list(model.log), {name: list(each) for name, each in model.seen.items()}),
        "number": int(model.number),
        "random": (random.random(), np.random.rand(), float(tf.random.uniform(())), model.draws.random()),
        "seeds": [v.numpy().tolist() for v in model.non_trainable_variables],
        "losses": len(model.losses),
    }


def run(comm: Any, look: str, divide: bool) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model, plain, x = Hostile(), Hostile(), np.ones((4, 8), np.float32)
    model(x)
    plain(x)
    plain.set_weights(model.get_weights())
    keras.utils.set_random_seed(1)
    calls = look in ("first call", "function")
    if divide:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options: Any = {} if calls else {look: x}
            parallelize(model, comm, PLAN, **options)
            if look == "function":
                verify(model, plain, comm, x)
    if calls:
        model(x)
    return kept(model)


@pytest.mark.parametrize("look", ["example", "verify", "first call", "function"])
def test_a_check_has_no_side_effects(comm: Any, look: str) -> None:
    """The state matches a run without a check, or one call."""
    expected, got = run(comm, look, divide=False), run(comm, look, divide=True)
    for what, value in expected.items():
        assert got[what] == value, what


class Stats:
    """A class that holds counters and has no instances."""

    calls = 0
    log: ClassVar[list[int]] = []
    table: ClassVar[UserDict[str, int]] = UserDict(n=0)
    lengths: ClassVar[dict[int, int]] = {}
    draws = tf.random.Generator.from_seed(1)
    callback, optimizer = keras.callbacks.Callback(), keras.optimizers.SGD()


@functools.cache
def once(length: int) -> None:
    Stats.lengths[length] = Stats.calls


class Naming(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that changes state through names only, and draws random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = keras.layers.Dense(12, "relu", name="up"), keras.layers.Dense(8, name="down")
        self.mode, self.drawn = "fast", 0.0

    def call(self, x: Any) -> Any:
        getattr(self, f"run_{self.mode}")()
        once(x.shape[0])
        assert Stats.lengths[x.shape[0]] >= 1
        return self.down(self.up(x + 0 * Stats.draws.uniform((), dtype=x.dtype)))

    def run_fast(self) -> None:
        Stats.calls += 1
        Stats.log.append(1)
        Stats.table["n"] += 1
        Stats.callback.count = getattr(Stats.callback, "count", 0) + 1
        Stats.optimizer.count = getattr(Stats.optimizer, "count", 0) + 1


@pytest.mark.parametrize("look", ["example", "first call"])
def test_a_check_restores_state_reached_by_name(comm: Any, look: str) -> None:
    """Regression: one call was counted four times, and one-time work was skipped in the call itself."""
    x, got = np.ones((4, 8), np.float32), []
    for divided in (False, True):
        model = Naming()
        model(x)
        Stats.calls, Stats.table["n"], Stats.callback.count, Stats.optimizer.count = 0, 0, 0, 0
        Stats.draws.reset_from_seed(1)
        Stats.log.clear()
        Stats.lengths.clear()
        once.cache_clear()
        if divided:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallelize(model, comm, PLAN, **({} if look == "first call" else {look: x}))  # type: ignore[arg-type]
        model(x)
        model(x)
        counts = Stats.calls, len(Stats.log), Stats.table["n"], Stats.callback.count, Stats.optimizer.count
        got.append((*counts, dict(Stats.lengths), float(Stats.draws.uniform(()))))
    assert got[0] == got[1]
    assert got[0][:5] == (2, 2, 2, 2, 2)
