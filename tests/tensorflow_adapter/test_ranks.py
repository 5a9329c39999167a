"""Arguments `ranks`: a communicator, a mesh with one axis and a process set give the same result in every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.errors import UsageError
from commlib.mesh_groups import Mesh

pytestmark = pytest.mark.any_mpi

pair = pytest.mark.ranks(min=2, max=2)

X, Y = np.arange(16, dtype=np.float32).reshape(4, 4) / 16, np.ones((4, 2), np.float32)


def model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([layers.Input((4,)), layers.Dense(8, "relu", name="up"), layers.Dense(2, name="down")])


def piped(ranks: Any) -> Any:
    pipe = ct.pipeline(model(), ranks=ranks, schedule="gpipe", microbatches=2)
    pipe.compile(keras.optimizers.SGD(0.1), "mse")
    return pipe.step(X, Y)


def sharded(ranks: Any) -> Any:
    plan = {"up": ct.Column(), "down": ct.Row()}
    return ct.parallelize(model(), ranks=ranks, plan=plan, report=str)(X)


def optimized(ranks: Any) -> Any:
    net = model()
    net.compile(ct.DistributedOptimizer(keras.optimizers.SGD(0.1), ranks=ranks), "mse")
    net.train_on_batch(X + ct.rank(), Y)
    return net.get_weights()[0]


def one_bit(ranks: Any) -> Any:
    net = model()
    net.compile(ct.OneBitAdam(freeze_step=2, ranks=ranks), "mse")
    net.train_on_batch(X + ct.rank(), Y)
    return net.get_weights()[0]


def reduced(ranks: Any) -> Any:
    x = tf.constant(X) + ct.rank()
    return ct.all_reduce(x, ranks=ranks) + ct.broadcast(x, root=1, ranks=ranks)


def redistributed(ranks: Any) -> Any:
    return ct.tensor.gather(ct.tensor.scatter(X, ranks=ranks), ranks=ranks)


def mixed(ranks: Any) -> Any:
    keras.utils.set_random_seed(0)
    return ct.MoE(ct.Experts(2, top_k=1, hidden=8), ranks=ranks)(X)


CALLS = [piped, sharded, optimized, one_bit, reduced, redistributed, mixed]


@pair
@pytest.mark.parametrize("call", CALLS)
def test_all_kinds_of_ranks(call: Callable[[Any], Any], comm: Any) -> None:
    expected = np.asarray(call(comm))
    for ranks in (Mesh(dp=2)["dp"], Mesh(tp=2), Mesh(ranks=comm, pp=2), ct.global_process_set):
        if call is mixed and isinstance(ranks, Mesh):
            ranks = Mesh(ep=2)  # experts use this axis
        assert np.array_equal(call(ranks), expected)


@pair
@pytest.mark.parametrize("call", [call for call in CALLS if call is not mixed])
def test_other_ranks_are_refused_by_name(call: Callable[[Any], Any], comm: Any) -> None:
    mesh = Mesh(pp=1, tp=2)
    for ranks, text in (("tp", "ranks is the str 'tp'"), (mesh, r"ranks is the whole Mesh\(pp=1, tp=2\)")):
        with pytest.raises(UsageError, match=rf"^\w+: {text}: expected a Communicator"):
            call(ranks)


@pair
def test_a_whole_mesh_is_all_its_ranks(comm: Any, tmp_path: Path) -> None:
    folder = comm.broadcast_object(tmp_path)
    assert ct.Checkpoint(folder, model=model(), ranks=Mesh(pp=1, tp=2)).save(1).is_dir()
    with pytest.raises(UsageError, match="Checkpoint: ranks is the int 3"):
        ct.Checkpoint(folder, model=model(), ranks=3)  # type: ignore[arg-type]


@pair
def test_ranks_must_not_be_given_twice(comm: Any) -> None:
    with pytest.raises(UsageError, match="ranks= and mesh= both say which ranks"):
        ct.DistributedOptimizer(keras.optimizers.SGD(0.1), ranks=comm, mesh=Mesh(dp=2))


@pytest.mark.ranks(min=3, max=4)
def test_groups_of_a_communicator_reduce_by_name(comm: Any) -> None:
    """Each group reduces among its own ranks."""
    pair = comm.split(comm.rank // 2)
    optimizer: Any = ct.DistributedOptimizer(keras.optimizers.SGD(1.0), ranks=pair)
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer.apply([tf.constant([float(comm.rank)])], [variable])
    group = range(comm.rank // 2 * 2, min(comm.rank // 2 * 2 + 2, comm.size))
    assert variable.numpy() == [-np.mean(group)]
