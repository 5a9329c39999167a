"""Files of divided Keras models contain the whole model, also from callbacks, and never parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import (
    ColumnDense,
    ParallelAttention,
    ParallelMLP,
    gather_model,
    gather_weights,
    parallelize,
)
from tests.tensorflow_adapter.tensor_oracle import in_float64, values

__all__ = ["in_float64"]
PLAN: Any = {"attention": Column(), "up": Column(), "down": Row()}
FEW: Any = {"up": Column(), "down": Row()}
X, Y = values(8, 3, 8, seed=1), values(8, 3, 8, seed=2)


@pytest.fixture
def folder(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rank 0's, for all ranks."""
    return Path(comm.broadcast_object(str(tmp_path_factory.mktemp("files"))))


def make(seed: int = 0, *, attention: bool = True, grouped: int = 0) -> Any:
    """A model without biases of keys, whose gradients would be mere rounding."""
    keras.utils.set_random_seed(seed)
    x = given = keras.Input((3, 8))
    x = keras.layers.Dense(8, name="first")(x)
    if attention:
        x = keras.layers.MultiHeadAttention(4, 2, use_bias=False, name="attention")(x, x)
    if grouped:
        x = keras.layers.GroupQueryAttention(2, 2 * grouped, grouped, use_bias=False, name="grouped_attention")(x, x)
    x = keras.layers.Dense(8, name="down")(keras.layers.Dense(6, "tanh", name="up")(x))
    model = keras.Model(given, x)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    return model


def steps(model: Any, count: int = 2) -> list[float]:
    model.run_eagerly = True  # a loaded model does not have it
    return [float(model.train_on_batch(X, Y)) for _ in range(count)]


def close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_file_of_the_whole_is_read_with_its_optimizer(comm: Any, folder: Path) -> None:
    """Regression: attention did not find its weights in the file, and whole momentum did not fit parts."""
    heads = 3 if comm.size == 3 else 2  # which 3 ranks cannot share
    plain = make(grouped=heads)
    divided = parallelize(make(5, grouped=heads), comm, PLAN | {"grouped_attention": Column()})
    steps(plain)
    if comm.rank == 0:
        plain.save_weights(folder / "whole.weights.h5")
    comm.barrier()
    divided.optimizer.build(divided.trainable_variables)
    divided.load_weights(folder / "whole.weights.h5")
    close(gather_weights(divided), plain.get_weights())
    close(steps(divided), steps(plain))


def freeze_a_variable(model: Any) -> None:
    model.get_layer("first").kernel.trainable = False


def freeze_within(model: Any) -> None:
    model.get_layer("attention").value_dense.trainable = False


def freeze(model: Any) -> None:
    model.get_layer("attention").trainable = False


@pytest.mark.parametrize(
    ("before", "later"),
    [
        (freeze, None),
        (freeze_a_variable, freeze),
        (freeze_within, None),
    ],
    ids=["layer", "later", "within"],
)
def test_a_gathered_model_keeps_frozen_weights(comm: Any, before: Any, later: Any) -> None:
    """Regression: layers inside of a frozen one trained in the gathered model, and its optimizer did not fit."""
    models = make(), parallelize(make(), comm, PLAN)
    for model in models:
        before(model)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
        steps(model)
        if later is not None:  # the optimizer knows the weights frozen since
            later(model)
            steps(model, 1)
    plain, divided = models
    whole = gather_model(divided)
    assert [v.path for v in whole.trainable_variables] == [v.path for v in plain.trainable_variables]
    close(steps(whole), steps(plain))
    close(whole.get_weights(), plain.get_weights())


@pytest.mark.parametrize("kind", ["model", "weights"])
def test_callbacks_write_the_whole_once(comm: Any, folder: Path, kind: str) -> None:
    """Regression: ModelCheckpoint was refused after the first epoch, despite the documentation."""
    path = "kept{epoch}.keras" if kind == "model" else "kept{epoch}.weights.h5"
    plain, divided = make(), parallelize(make(), comm, PLAN)
    kept = []
    for model, where in ((plain, folder / f"plain{comm.rank}"), (divided, folder / "divided")):
        kept.append(
            keras.callbacks.ModelCheckpoint(
                where / path, "loss", save_best_only=True, save_weights_only=kind != "model"
            )
        )
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[kept[-1]])
    assert kept[0].best == pytest.approx(kept[1].best, rel=1e-12)
    comm.barrier()
    file = path.format(epoch=2)
    if kind == "model":
        read = keras.models.load_model(folder / "divided" / file)
    else:
        read = make(5)
        steps(read, 1)
        read.load_weights(folder / "divided" / file)
    close(read.get_weights(), plain.get_weights())
    close(steps(read), steps(plain))


def test_fit_continues_from_a_backup(comm: Any, folder: Path) -> None:
    """Regression: BackupAndRestore was refused, despite the documentation."""

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("stopped")

    def fit(model: Any, *more: Any) -> Any:
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        return model.fit(X, Y, batch_size=8, epochs=4, verbose=0, callbacks=[backup, *more]).history["loss"]

    with pytest.raises(RuntimeError, match="stopped"):
        fit(parallelize(make(attention=False), comm, FEW), Stop())
    comm.barrier()
    divided, plain = parallelize(make(5, attention=False), comm, FEW), make(attention=False)
    losses = steps(plain, 4)
    close(fit(divided), losses[2:])
    close(gather_weights(divided), plain.get_weights())
    comm.barrier()
    assert not (folder / "backup").exists()


@pytest.mark.ranks(min=2)
def test_callbacks_of_some_ranks_are_refused(comm: Any, folder: Path) -> None:
    """A file needs the parts of all ranks: if only one rank has the callback, all raise before the first step."""
    divided = parallelize(make(attention=False), comm, FEW)
    callbacks = [keras.callbacks.ModelCheckpoint(folder / "kept.keras")] if comm.rank == 0 else []
    with pytest.raises(UsageError, match=r"are \[\['ModelCheckpoint'\], \[\].*: pass the same ones to all of them"):
        divided.fit(X, Y, verbose=0, callbacks=callbacks)


@pytest.mark.ranks(min=2)
def test_parts_are_not_written(comm: Any, folder: Path) -> None:
    """Regression: HDF5, and files of layers constructed divided, silently contained one rank's parts."""
    inputs = keras.Input((8,))
    divided = parallelize(make(attention=False), comm, FEW)
    for model in (divided, keras.Model(inputs, ColumnDense(6, comm)(inputs))):
        for name in ("kept.h5", "kept.keras", "kept.weights.h5"):
            save = model.save_weights if "weights" in name else model.save
            with pytest.raises(UsageError, match=r"has a shard of this model: save gather_model\(model\)"):
                save(folder / f"{comm.rank}{name}")
    with pytest.raises(UsageError, match="has a shard of this model"):
        keras.saving.save_model(divided, folder / f"{comm.rank}saved.h5")


@pytest.mark.ranks(min=2)
@pytest.mark.ranks(min=2)
def test_copies_are_refused(comm: Any) -> None:
    """For a reference model or a mean teacher, clone the model before it is divided."""
    model = parallelize(make(attention=False), comm, FEW)
    with pytest.raises(UsageError, match=r"for a copy, shard a clone that was made before"):
        copy.deepcopy(model)


def test_clones_are_whole_or_refused(comm: Any) -> None:
    """Regression: a layer constructed divided reported a missing argument of its constructor."""
    model = parallelize(make(), comm, PLAN)
    clone = keras.models.clone_model(model)
    assert [weight.shape for weight in clone.weights] == [weight.shape for weight in make().weights]
    layer: Any = model.get_layer("up")
    assert type(type(layer).from_config(layer.get_config())) is keras.layers.Dense
    x = keras.Input((3, 8))
    built = keras.Model(x, ParallelMLP(8, 16, comm)(ParallelAttention(8, 4, comm)(x)))
    for copied in (lambda: keras.models.clone_model(built), lambda: keras.Model.from_config(built.get_config())):
        with pytest.raises(UsageError, match=r"needs the ranks of an axis, which a configuration cannot hold"):
            copied()
    with pytest.raises(UsageError, match="ParallelMLP needs the ranks"):
        keras.models.clone_model(keras.Model(x, ParallelMLP(8, 16, comm)(x)))


def test_a_tensorflow_checkpoint_identifies_its_parts(comm: Any, folder: Path) -> None:
    """Regression: parts of other ranks have the same shapes, and were silently loaded."""
    divided = parallelize(make(attention=False), comm, FEW)
    steps(divided, 1)
    tf.train.Checkpoint(model=divided).write(str(folder / f"{comm.rank}"))
    weights = divided.get_weights()
    comm.barrier()
    steps(divided, 1)
    tf.train.Checkpoint(model=divided).read(str(folder / f"{comm.rank}")).assert_consumed()
    close(divided.get_weights(), weights)
    other = (comm.rank + 1) % comm.size
    with pytest.raises(
        UsageError, match=f"rank {comm.rank} of {comm.size} reads a checkpoint with the shard of rank {other}"
    ):
        tf.train.Checkpoint(model=divided).read(str(folder / f"{other}"))
