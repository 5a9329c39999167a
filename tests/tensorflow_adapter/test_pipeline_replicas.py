"""Keras pipelines with replicas, two stages on two ranks each, match one process with the whole batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib import Mesh
from commlib.data_parallel.reducer import GradientReducer
from commlib.errors import PeerError, UsageError
from commlib.pipeline.schedule import table
from commlib_tensorflow import DistributedOptimizer, pipeline
from commlib_tensorflow.keras import DistributedOptimizer as KerasDistributedOptimizer
from commlib_tensorflow.keras.callbacks import MetricAverageCallback
from commlib_tensorflow.pipelines._replicas import StageReduction
from commlib_tensorflow.pipelines._stages import TensorflowStage
from tests.inputs.keras_pipelines import (
    WIDTH,
    SingleProcess,
    assert_gradients,
    assert_weights,
    batch,
    filled,
    in_float64,
    layers,
    near,
)

__all__ = ["in_float64"]  # a fixture

ROWS = 7  # of a replica, in three microbatches
SMALL: dict[str, Any] = {"bucket_cap_mib": 1e-4, "first_bucket_mib": 1e-4}  # so that there are many buckets

pytestmark = pytest.mark.ranks(min=4, max=4)


def tied() -> Any:
    """Six layers, and one that is the first and the last, on different ranks unless stages form a V."""
    x = keras.Input((WIDTH,))
    ends = keras.layers.Dense(WIDTH, name="ends", bias_regularizer="l1")
    value = keras.ops.tanh(ends(x))
    for number in range(6):
        options = {"kernel_regularizer": keras.regularizers.L2(0.1)} if number in (2, 5) else {}
        value = keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}", **options)(value)
    return filled(keras.Model(x, ends(value)))


def mine(mesh: Mesh, *arrays: Any) -> list[Any]:
    """Return this replica's part of each batch: the batches of all replicas form those of one process."""
    replica = mesh.coordinate("dp")
    return [array.reshape(-1, 2, ROWS, WIDTH)[:, replica].reshape(-1, WIDTH) for array in arrays]


@pytest.fixture
def by_stages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one in each step whose gradients were reduced by stages."""
    steps: list[int] = []
    plain = StageReduction.finish

    def noting(reduction: StageReduction, gradients: Any) -> Any:
        steps.append(len(steps))
        return plain(reduction, gradients)

    monkeypatch.setattr(StageReduction, "finish", noting)
    return steps


@pytest.mark.parametrize("name", [name for name, plan in table.items() if not plan.updates])
def test_steps_match_one_process(comm: Any, by_stages: list[int], name: Any) -> None:
    """Each step accumulates the gradients of two batches; the first one clips them by the norm over all stages."""
    mesh = Mesh(pp=2, dp=2)
    alone = SingleProcess(tied(), keras.optimizers.Adam(0.05))
    optimizer: Any = DistributedOptimizer(keras.optimizers.Adam(0.05), mesh=mesh, **SMALL)
    pipe = pipeline(tied(), mesh["pp"], schedule=name, microbatches=3, loss="mse", optimizer=optimizer)
    for step in range(2):
        for half in range(2):
            x, y = batch(2 * ROWS, 2 * step + half)
            got = float(pipe.step(*mine(mesh, x, y)))
            near(sum(comm.all_gather_object(got)) / comm.size, alone.step(x, y))
        if step == 0:
            norm = float(tf.linalg.global_norm(list(alone.gradients.values())))
            near(pipe.clip_grad_norm(norm / 2), norm)
            alone.gradients = {key: tf.divide(g, 2.0) for key, g in alone.gradients.items()}
            assert_gradients(pipe, alone.gradients)
        pipe.apply_gradients()
        alone.update()
        assert_weights(pipe, alone.model, 1e-9)  # Adam divides by gradients: values near 0 amplify the difference
    assert optimizer.statistics.reductions == 2, "once in a step, clipped or not"
    assert not by_stages, "nobody knew which batch would be the last one"
    pipe.close()
    mesh.close()


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        ("1f1b", False),
        ("zb_v", True),
        ("breadth_first", True),
    ],
)
def test_fit_matches_one_process(comm: Any, by_stages: list[int], name: Any, overlap: bool) -> None:
    """Logs are averaged over the replicas."""
    mesh = Mesh(pp=2, dp=2)
    x, y = batch(4 * ROWS)
    limit = {"global_clipnorm": 0.3} if name != "breadth_first" else {}
    whole = tied()
    whole.compile(optimizer=keras.optimizers.Adam(0.05, **limit), loss="mse", metrics=["mae"], run_eagerly=True)
    plain: Any = keras.optimizers.Adam(0.05, **limit)
    optimizer: Any = DistributedOptimizer(plain, mesh=mesh, overlap=overlap, **SMALL)
    pipe = pipeline(tied(), mesh["pp"], schedule=name, microbatches=3)
    pipe.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = whole.fit(x, y, batch_size=2 * ROWS, **options).history
    options |= {"batch_size": ROWS, "callbacks": [MetricAverageCallback()]}
    got = pipe.fit(*mine(mesh, x, y), **options).history
    assert got.keys() == expected.keys()
    for key in got:
        near(got[key], expected[key], 1e-9)
    assert_weights(pipe, whole, 1e-9)
    assert len(by_stages) == (4 if overlap else 0)
    assert optimizer.statistics.reductions == 4, "nothing is reduced twice"
    assert (optimizer.statistics.early_launches > 0) == overlap
    pipe.close()
    mesh.close()


def test_earlier_accumulated_gradients_are_reduced_too(comm: Any, by_stages: list[int]) -> None:
    mesh = Mesh(pp=2, dp=2)
    alone = SingleProcess(layers(4), "sgd")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh, op=ct.Sum, overlap=True)
    pipe = pipeline(layers(4), mesh["pp"], microbatches=3, loss="mse", optimizer=optimizer)
    for seed, call in ((0, pipe.step), (1, pipe.train_on_batch), (2, pipe.train_on_batch)):
        x, y = batch(2 * ROWS, seed)
        call(*mine(mesh, x, y))
        alone.step(x, y)
        if seed:
            alone.gradients = {key: tf.multiply(g, 2.0) for key, g in alone.gradients.items()}  # a sum, not a mean
            alone.update()
            assert_weights(pipe, alone.model)
    assert len(by_stages) == 1
    pipe.close()
    mesh.close()


def test_updates_while_the_pipeline_runs(comm: Any) -> None:
    """Each update uses a microbatch of all replicas, as without replicas and with microbatches twice as large."""
    mesh = Mesh(pp=2, dp=2)
    plain = keras.optimizers.SGD(0.3, momentum=0.9)
    twice = keras.optimizers.SGD(0.3, momentum=0.9)
    alone, pipe = (
        pipeline(layers(2), mesh["pp"], schedule="pipedream", microbatches=3, loss="mse", optimizer=optimizer)
        for optimizer in (plain, DistributedOptimizer(twice, mesh=mesh, overlap=True))
    )
    x, y = batch(12)
    alone.train_on_batch(x, y)
    part = (array.reshape(3, 2, 2, WIDTH)[:, mesh.coordinate("dp")].reshape(6, WIDTH) for array in (x, y))
    pipe.train_on_batch(*part)
    for got, expected in zip(pipe.gather_weights(), alone.gather_weights(), strict=True):
        near(got, expected)
    for each in (alone, pipe):
        each.close()
    mesh.close()


def test_gradients_are_reduced_after_their_last_microbatch(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breadth first: the second stage's gradients are reduced while the first one still computes its own.

    A tied weight's gradient waits for the end of the step, when its owners have summed it.
    """
    mesh = Mesh(pp=2, dp=2)
    optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh, overlap=True)
    pipe = pipeline(tied(), mesh["pp"], schedule="breadth_first", microbatches=3, loss="mse", optimizer=optimizer)
    ready: list[tuple[str, int]] = []
    plain_ready, plain_finish = GradientReducer.ready, StageReduction.finish
    ended: list[bool] = []

    def noting(reducer: GradientReducer, index: int) -> None:
        ready.append(("end" if ended else pipe.pipe.runner.position.split(" ")[0], index))
        plain_ready(reducer, index)

    def finish(reduction: StageReduction, gradients: Any) -> Any:
        ended.append(True)
        return plain_finish(reduction, gradients)

    monkeypatch.setattr(GradientReducer, "ready", noting)
    monkeypatch.setattr(StageReduction, "finish", finish)
    pipe.train_on_batch(*batch(ROWS))
    rank = mesh["pp"].rank
    assert list(dict.fromkeys(action for action, _ in ready)) == [f"{rank + 2}REDUCE", f"{rank}REDUCE", "end"]
    names = {variable.path for variable in pipe.trainable_variables if "ends" in variable.path}
    at_end = {pipe.trainable_variables[index].path for action, index in ready if action == "end"}
    assert at_end == names and len(names) == 2
    assert len({index for _, index in ready}) == len(ready) == len(pipe.trainable_variables)
    pipe.close()
    mesh.close()


def test_a_failed_step_leaves_no_pending_reduction(
    comm: Any, monkeypatch: pytest.MonkeyPatch, by_stages: list[int]
) -> None:
    """Some gradients were in flight. Another pipeline of the same layers and optimizer continues without them."""
    mesh = Mesh(pp=2, dp=2)
    model, alone = layers(4), SingleProcess(layers(4), "sgd")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh, overlap=True, **SMALL)
    options: dict[str, Any] = {"schedule": "breadth_first", "microbatches": 3, "loss": "mse", "optimizer": optimizer}
    pipe = pipeline(model, mesh["pp"], **options)

    plain = TensorflowStage.backward

    def fail(stage: TensorflowStage, *arguments: Any, **options: Any) -> Any:
        if stage.number < 2:  # later stages are done then
            raise ZeroDivisionError("no such gradient")
        return plain(stage, *arguments, **options)

    with monkeypatch.context() as patched, pytest.raises((ZeroDivisionError, PeerError)):
        patched.setattr(TensorflowStage, "backward", fail)
        pipe.train_on_batch(*batch(ROWS))
    again = pipeline(model, mesh["pp"], **options)
    for step in range(2):
        x, y = batch(2 * ROWS, step)
        again.train_on_batch(*mine(mesh, x, y))
        alone.step(x, y)
        alone.update()
        assert_weights(again, alone.model)
    assert len(by_stages) == 2
    again.close()
    mesh.close()


def test_models_without_stages(comm: Any) -> None:
    """Each rank has a whole model, compiled by Keras and trained with the replicas alone, also on a closed mesh."""
    mesh = Mesh(pp=2, dp=2)
    x, y = batch(2 * ROWS, mesh.coordinate("pp"))
    optimizers: list[Any] = [keras.optimizers.Adam(0.05), DistributedOptimizer(keras.optimizers.Adam(0.05), mesh=mesh)]
    mesh.close()
    optimizers.append(KerasDistributedOptimizer(keras.optimizers.Adam(0.05), mesh=mesh))
    models: list[Any] = []
    for optimizer in optimizers:
        model = layers(1)
        model.compile(optimizer=optimizer, loss="mse")
        data = mine(mesh, x, y) if models else (x, y)
        model.fit(*data, batch_size=2 * ROWS, epochs=2, shuffle=False, verbose=0)
        models.append(model)
        assert_weights(model, models[0], 1e-9)


def test_the_ranks_of_meshes(comm: Any) -> None:
    """A mesh registers its sets once; a set of all ranks exists already, and one rank reduces nothing."""

    def reducer(**options: Any) -> Any:
        mesh = Mesh(**options)
        distributed: Any = DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh)
        mesh.close()
        return distributed.reducer

    rank = comm.rank
    assert reducer(pp=2, dp=2).process_set.ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert reducer(dp=2, pp=2).process_set.ranks == [rank % 2, rank % 2 + 2]
    assert reducer(dp=2, pp=2).process_set == reducer(dp=2, pp=2).process_set
    assert reducer(dp=4).process_set.process_set_id == 0
    assert reducer(pp=4, dp=1).alone
    others = comm.split(0, (1, 3, 2, 0)[rank])  # in the order 3, 0, 2, 1
    assert reducer(ranks=others, pp=2, dp=2).process_set.ranks == ([0, 3] if rank in (0, 3) else [1, 2])
    others.close()


def test_users_may_add_sets_of_the_same_ranks(comm: Any) -> None:
    """Sets registered by a mesh are separate: users add and remove sets of the same ranks independently."""
    mesh = Mesh(pp=2, dp=2)
    reducers: list[Any] = [DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh).reducer for _ in range(2)]
    mesh.close()
    for _ in range(2):
        added = ct.add_process_set([0, 1])
        assert added.included() == (comm.rank < 2)
        if comm.rank < 2:
            assert ct.allreduce(tf.constant(comm.rank + 1.0), process_set=added) == 1.5
        with pytest.raises(UsageError, match="already has these ranks"):
            ct.add_process_set([0, 1])
        assert ct.remove_process_set(added) and added.process_set_id is None
        assert not ct.remove_process_set(added)
    for reducer in reducers:
        got = reducer([tf.constant([float(comm.rank)])], ["weight"])
        near(got[0], [comm.rank // 2 * 2 + 0.5])


def test_invalid_arguments_are_refused(comm: Any) -> None:
    mesh, flat, half = Mesh(pp=2, dp=2), Mesh(pp=4), comm.split(comm.rank // 2)
    part = Mesh(ranks=half, dp=2)
    refused: list[tuple[str, dict[str, Any]]] = [
        (r"reduces over its axes dp and cp, but .* has neither", {"mesh": flat}),
        ("process_set= and mesh= both say which ranks", {"mesh": mesh, "process_set": ct.ProcessSet([0, 1])}),
        ("over 2 of 4 ranks", {"mesh": part}),
    ]
    for text, options in refused:
        with pytest.raises(UsageError, match=text):
            DistributedOptimizer(keras.optimizers.SGD(), **options)
    with pytest.raises(UsageError, match="different stages of this pipeline: give it mesh="):
        everywhere = DistributedOptimizer(keras.optimizers.SGD())
        pipeline(layers(4), mesh["pp"], microbatches=2, loss="mse", optimizer=everywhere)
    for text, passes in (("adds up several passes", 2), ("leaves some", 1)):
        optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh, backward_passes_per_step=passes)
        pipe = pipeline(layers(4), mesh["pp"], microbatches=2, loss="mse", optimizer=optimizer)
        if passes == 1:
            optimizer.register_local_var(pipe.trainable_variables[0])
        pipe.step(*batch(ROWS))
        with pytest.raises(UsageError, match=text):
            pipe.clip_grad_norm(1.0)
        pipe.close()
    for each in (part, flat, mesh, half):
        each.close()


def test_replicas_keep_the_same_weights(comm: Any, tmp_path: Any) -> None:
    """Each replica shuffles arrays by itself, and a callback decides by logs of all replicas.

    One of them saves the model, with the optimizer's state.
    """
    mesh = Mesh(pp=2, dp=2)
    x = np.random.default_rng(0).normal(size=(32, WIDTH))
    pipe = pipeline(layers(4), mesh["pp"], microbatches=2)
    pipe.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(0.05), mesh=mesh), loss="mse")
    stop = keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=0)
    part = x[mesh.coordinate("dp") :: 2]
    losses = pipe.fit(
        part, np.tanh(part), batch_size=8, epochs=20, verbose=0, callbacks=[MetricAverageCallback(), stop]
    ).history["loss"]
    assert len(losses) < 20 and comm.all_gather_object(losses) == [losses] * comm.size
    weights = [[weight.tolist() for weight in each] for each in mesh["dp"].all_gather_object(pipe.gather_weights())]
    assert weights[0] == weights[1]
    path = comm.broadcast_object(str(tmp_path), 0) + "/whole.keras"
    if mesh.coordinate("dp") == 0:
        pipe.save(path)
    comm.barrier()
    whole = keras.models.load_model(path)
    losses = [float(each.train_on_batch(x[:8], x[:8])) for each in (whole, pipe)]
    near(losses[1], losses[0])
    assert_weights(pipe, whole)
    pipe.close()
    mesh.close()
