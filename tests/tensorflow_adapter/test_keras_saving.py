"""Saving writes the plain model, and a model loaded by commlib continues to train on all ranks."""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import commlib_tensorflow.keras as hvd
from commlib.errors import UsageError

from .keras_oracle import assert_close, assert_same_everywhere, batch, mine, network, state_of, step, weights


class Halving(keras.optimizers.SGD):  # type: ignore[misc]
    """A user-defined optimizer."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * 0.5, variable, learning_rate)


def trained(comm: Any, optimizer: Any) -> Any:
    model = network()
    model.compile(optimizer, keras.losses.MeanSquaredError())
    for number in range(2):
        step(model, model.optimizer, mine(comm, batch(comm, number)))
    return model


@pytest.mark.parametrize(("suffix", "scaled"), [("keras", False), ("keras", True), ("h5", False)])
def test_the_file_matches_the_plain_optimizer(comm: Any, tmp_path: Path, suffix: str, scaled: bool) -> None:
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


def test_a_loaded_model_continues_training(comm: Any, tmp_path: Path) -> None:
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


def test_a_user_defined_optimizer_can_be_loaded(comm: Any, tmp_path: Path) -> None:
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


def test_a_model_without_optimizer_can_be_loaded(tmp_path: Path) -> None:
    network().save(tmp_path / "model.keras")
    assert_close(hvd.load_model(tmp_path / "model.keras"), network(), 1e-6)


def test_a_model_compiled_by_xla_loads_without_xla(monkeypatch: Any, comm: Any, tmp_path: Path) -> None:
    """On a GPU "auto" is resolved and saved with the plain optimizer."""
    model = network()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(), jit_compile=True)
    step(model, model.optimizer, batch(comm))
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert not loaded.jit_compile
    assert loaded.train_function is None


COPIES: dict[str, Any] = {
    "from_config": lambda optimizer: type(optimizer).from_config(optimizer.get_config()),
    "type": lambda optimizer: type(optimizer)(0.5, momentum=0.25),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
PLAIN: dict[str, Any] = {
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "serialize": lambda optimizer: keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    "class": lambda optimizer: optimizer.__class__.from_config(optimizer.get_config()),
}


def after_four_steps(optimizer: Any, gradient: float, kind: Any = keras.Variable) -> float:
    """Return the value of a weight that starts at 0."""
    weight = kind(np.zeros(1), dtype="float32")
    for _ in range(4):
        optimizer.apply_gradients([(tf.constant([gradient]), weight)])
    return float(np.asarray(weight)[0])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("settings", [{}, {"op": hvd.Sum, "compression": "bf16"}, {"backward_passes_per_step": 2}])
def test_copies_of_a_distributed_optimizer_reduce_like_it(comm: Any, settings: dict[str, Any], legacy: bool) -> None:
    """Regression: some failed in the first step; a deep copy silently trained alone."""
    of, kind = (tf_keras, tf.Variable) if legacy else (keras, keras.Variable)
    optimizer = hvd.DistributedOptimizer(of.optimizers.SGD(0.5, momentum=0.25), **settings)
    total = comm.size * (comm.size + 1) / 2
    gradient = total if "op" in settings else total / comm.size
    passes = settings.get("backward_passes_per_step", 1)
    weight = velocity = 0.0
    for _ in range(4 // passes):
        velocity = 0.25 * velocity - 0.5 * passes * gradient
        weight += velocity
    for name, make in COPIES.items():
        if legacy and "copy" in name:
            with pytest.raises(UsageError, match="from_config"):
                make(optimizer)
            continue
        assert after_four_steps(make(optimizer), comm.rank + 1.0, kind) == pytest.approx(weight, rel=1e-6), name


def test_keras_serialises_a_distributed_optimizer_as_plain(comm: Any) -> None:
    """Regression: it could not be pickled."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.25))
    for name, make in PLAIN.items():
        wrapped = make(optimizer)
        assert type(wrapped) is keras.optimizers.SGD and wrapped.momentum == 0.25, name
        expected = after_four_steps(keras.optimizers.SGD(0.5, momentum=0.25), comm.rank + 1.0)
        assert after_four_steps(wrapped, comm.rank + 1.0) == expected, name
        assert type(hvd.DistributedOptimizer(make(optimizer))) is not keras.optimizers.SGD


def test_an_optimizer_with_variables_cannot_be_recreated(comm: Any) -> None:
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    first.register_local_var(keras.Variable(np.zeros(1)))
    second = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), groups=[[keras.Variable(np.zeros(1))]])
    for optimizer, what in ((first, "stay on their rank"), (second, "groups of variables")):
        with pytest.raises(UsageError, match=what):
            copy.deepcopy(optimizer)


def test_checkpoints_of_tensorflow(comm: Any, tmp_path: Path) -> None:
    model = trained(comm, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    other = trained(comm, keras.optimizers.SGD(0.2, momentum=0.9))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(saved).assert_consumed()
    assert_close(other, model, 0)
    assert_close(state_of(other.optimizer), state_of(model.optimizer), 0)
    assert np.abs(state_of(other.optimizer)[2]).max() > 0
