"""Saving writes the plain model, and a model loaded by commlib trains on over all ranks."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow.keras as hvd
from commlib.errors import UsageError

from .keras_oracle import assert_close, assert_same_everywhere, batch, mine, network, state_of, step, weights


class Halving(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer of the user's own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * 0.5, variable, learning_rate)


def trained(comm: Any, optimizer: Any) -> Any:
    model = network()
    model.compile(optimizer, keras.losses.MeanSquaredError())
    for number in range(2):
        step(model, model.optimizer, mine(comm, batch(comm, number)))
    return model


@pytest.mark.parametrize(("suffix", "scaled"), [("keras", False), ("keras", True), ("h5", False)])
def test_the_file_is_that_of_the_plain_optimizer(comm: Any, tmp_path: Path, suffix: str, scaled: bool) -> None:
    optimizer: Any = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), backward_passes_per_step=2)
    model = trained(comm, keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    path = tmp_path / f"model.{suffix}"
    model.save(path)
    if suffix == "keras":
        config = zipfile.ZipFile(path).read("config.json").decode()
        assert json.loads(config)["compile_config"]["optimizer"]["module"] == "keras.optimizers"
        assert "commlib" not in config.lower() and "Distributed" not in config
    loaded = keras.models.load_model(path)
    inner = loaded.optimizer.inner_optimizer if scaled else loaded.optimizer
    assert type(inner) is keras.optimizers.Adam
    assert_close(loaded, model, 0)
    if suffix == "keras":  # Keras 3 does not read the optimizer's state from HDF5
        assert_close(state_of(loaded.optimizer), state_of(model.optimizer), 0)


def test_load_and_train_on(comm: Any, tmp_path: Path) -> None:
    model = trained(comm, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = hvd.load_model(path)
    alone = keras.models.load_model(path)
    assert_close(state_of(loaded.optimizer), state_of(model.optimizer), 0)
    for number in range(2, 4):
        step(loaded, loaded.optimizer, mine(comm, batch(comm, number)))
        step(alone, alone.optimizer, batch(comm, number))
    assert_close(loaded, alone)
    assert_same_everywhere(loaded)
    assert int(loaded.optimizer.iterations) == 4
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(loaded.optimizer)


def test_load_an_optimizer_of_the_users_own(comm: Any, tmp_path: Path) -> None:
    model = trained(comm, hvd.DistributedOptimizer(Halving(0.1)))
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Halving], compression=hvd.Compression.bf16)
    assert isinstance(loaded.optimizer, Halving)
    alone = network()
    alone.set_weights(weights(loaded))
    step(loaded, loaded.optimizer, mine(comm, batch(comm)))
    step(alone, Halving(0.1), batch(comm))
    assert_close(loaded, alone, 1e-2)
    assert_same_everywhere(loaded)


def test_load_a_model_without_optimizer(tmp_path: Path) -> None:
    network().save(tmp_path / "model.keras")
    assert_close(hvd.load_model(tmp_path / "model.keras"), network(), 1e-6)


def test_a_model_that_xla_compiled_is_not_compiled_any_more(monkeypatch: Any, comm: Any, tmp_path: Path) -> None:
    """On a GPU "auto" is resolved, and saved, with the plain optimizer."""
    model = network()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(), jit_compile=True)
    step(model, model.optimizer, batch(comm))
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert not loaded.jit_compile
    assert loaded.train_function is None


def test_copies_of_the_configuration_are_plain() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.25))
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(copy) is keras.optimizers.SGD
    assert copy.momentum == 0.25
    assert type(type(optimizer).from_config(optimizer.get_config())).__mro__[1] is not keras.optimizers.SGD


def test_checkpoints_of_tensorflow(comm: Any, tmp_path: Path) -> None:
    model = trained(comm, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    other = trained(comm, keras.optimizers.SGD(0.2, momentum=0.9))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(saved).assert_consumed()
    assert_close(other, model, 0)
    assert_close(state_of(other.optimizer), state_of(model.optimizer), 0)
    assert np.abs(state_of(other.optimizer)[2]).max() > 0
