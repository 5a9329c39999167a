"""State of divided Keras models: whole weights, files and optimizers, for any number of ranks; and pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow import pipeline
from commlib_tensorflow.tensor import gather_model, gather_weights, parallelize, set_weights
from tests.tensorflow_adapter.tensor_oracle import alone

WIDTH, HIDDEN, ROWS = 6, 9, 8
PLAN: Any = {"up*": Column(), "down*": Row()}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def folder(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rank 0's, for all ranks."""
    return Path(comm.broadcast_object(str(tmp_path_factory.mktemp("files"))))


def make(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    x = given = keras.Input((WIDTH,))
    for block in range(2):
        h = keras.layers.LayerNormalization(name=f"norm{block}")(x)
        h = keras.layers.Dense(HIDDEN, activation="tanh", name=f"up{block}")(h)
        x = keras.layers.Add(name=f"add{block}")([x, keras.layers.Dense(WIDTH, name=f"down{block}")(h)])
    model = keras.Model(given, x)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def fit(model: Any, seed: int = 1) -> list[float]:
    x, y = np.random.default_rng(seed).standard_normal((2, 3 * ROWS, WIDTH))
    losses: list[float] = model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history["loss"]
    return losses


def close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_whole_weights(comm: Any) -> None:
    divided = parallelize(make(), comm, PLAN)
    close(gather_weights(divided), make().get_weights())
    others = make(3).get_weights()
    set_weights(divided, others)
    close(gather_weights(divided), others)
    with pytest.raises(UsageError, match=r"7 weights, but the model has 12"):
        set_weights(divided, others[:7])


@pytest.mark.ranks(min=2)
def test_parts_are_neither_loaded_nor_written_as_whole_weights(comm: Any, folder: Path) -> None:
    divided = parallelize(make(), comm, PLAN)
    with pytest.raises(UsageError, match=r"expected \(6, 9\), the shape in the unsharded model"):
        set_weights(divided, divided.get_weights())
    with pytest.raises(UsageError, match=r"has a shard of this model: save gather_model\(model\)"):
        divided.save_weights(folder / f"{comm.rank}.weights.h5")
    for export in (divided.export, lambda path: tf.saved_model.save(divided, path)):
        with pytest.raises(UsageError, match=r"has a shard of this model: save gather_model\(model\)"):
            export(str(folder / f"served{comm.rank}"))


@pytest.mark.long
def test_training_continues_from_a_file(comm: Any, folder: Path) -> None:
    """It is saved whole with its optimizer, and continues divided, in one process, and on other numbers of ranks."""
    divided = parallelize(make(), comm, PLAN)

    def trained() -> Any:
        plain = make()
        fit(plain)
        return fit(plain, 2), plain.get_weights()

    expected, weights = alone(comm, trained)
    fit(divided)
    whole = gather_model(divided)
    assert type(whole.get_layer("up0")) is keras.layers.Dense
    if comm.rank == 0:
        whole.save(folder / "model.keras")
        whole.save_weights(folder / "model.weights.h5")
    comm.barrier()
    close(fit(divided, 2), expected)
    for axis in (comm, comm.split(int(comm.rank < 2), comm.rank)):
        loaded = parallelize(keras.models.load_model(folder / "model.keras"), axis, PLAN)
        close(fit(loaded, 2), expected)
        close(gather_weights(loaded), weights)
        fresh = parallelize(make(5), axis, PLAN)
        fresh.load_weights(folder / "model.weights.h5")
        close(gather_weights(fresh), whole.get_weights())
    close(alone(comm, lambda: fit(keras.models.load_model(folder / "model.keras"), 2)), expected)


@pytest.mark.ranks(min=4, max=4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages(comm: Any, folder: Path, schedule: Any) -> None:
    mesh = Mesh(pp=2, tp=2)
    plain = make()
    pipe = pipeline(parallelize(make(), mesh["tp"], PLAN), mesh["pp"], schedule=schedule, microbatches=2)
    for model in (plain, pipe):
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.05), "mse")
    close(fit(pipe), fit(plain))
    close(pipe.gather_weights(), plain.get_weights())
    pipe.save(folder / "model.keras")
    comm.barrier()
    loaded = keras.models.load_model(folder / "model.keras")
    close(loaded.get_weights(), plain.get_weights())
    close(fit(loaded, 2), fit(plain, 2))
    weights = loaded.get_weights()
    if comm.rank == 0:
        loaded.save_weights(folder / "more.weights.h5")
    comm.barrier()
    pipe.load_weights(folder / "more.weights.h5")
    close(pipe.gather_weights(), weights)


def test_layers_are_divided_in_turn(comm: Any) -> None:
    """Regression: with a second plan, all ranks got rank 0's parts of the layers divided by the first one."""
    axis, model, plain = Mesh(tp=comm.size)["tp"], make(), make()
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    parallelize(model, axis, {"up0": Column(), "down0": Row()})
    parallelize(model, axis, {"up1": Column(), "down1": Row()})
    for own, whole in zip(gather_weights(model), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(own, whole)
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-10, atol=1e-12)


class Subclassed(keras.Model):  # type: ignore[misc]
    """A model built only by its first call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down = keras.layers.Dense(HIDDEN, name="up"), keras.layers.Dense(WIDTH, name="down")

    def call(self, inputs: Any) -> Any:
        return self.down(self.up(inputs["x"]))


def test_a_subclassed_model_is_divided_in_turn(comm: Any) -> None:
    """Regression: its class could not be changed twice."""

    class Blocks(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [keras.layers.Dense(size, name=f"{at}") for at, size in enumerate((HIDDEN, WIDTH) * 2)]

        def call(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    axis, x = Mesh(tp=comm.size)["tp"], np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    plain, model = Blocks(), Blocks()
    for one in (plain, model):
        one(x)
    model.set_weights(plain.get_weights())
    for up, down in (("0", "1"), ("2", "3")):
        parallelize(model, axis, {up: Column(), down: Row()})
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)
    assert model.__class__ is Blocks


class BuiltLate(Subclassed):
    def build(self, shapes: Any) -> None:
        self.built = True


@pytest.mark.ranks(min=2, max=2)
def test_a_model_built_by_its_first_call_can_be_gathered(comm: Any) -> None:
    """Regression: it was refused although Keras stores the shapes of the call."""
    x = {"x": np.random.default_rng(1).standard_normal((ROWS, WIDTH))}
    for kind in (Subclassed, BuiltLate):
        keras.utils.set_random_seed(1)
        model = kind()
        expected = np.asarray(model(x))
        parallelize(model, comm, PLAN, example=x)
        if kind is Subclassed:
            np.testing.assert_allclose(gather_model(model)(x), expected, rtol=1e-10, atol=1e-12)
        else:
            with pytest.raises(UsageError, match="not built by its configuration"):
                gather_model(model)
