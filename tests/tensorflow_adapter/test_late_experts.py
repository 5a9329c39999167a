"""Experts with rows on the late device: a mixture in TensorFlow matches one rank there, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.expert import Experts
from commlib_tensorflow.expert import MoE
from tests.late import LATE
from tests.tensorflow_adapter import test_moe as experts
from tests.tensorflow_adapter.late import HostTensors, watched


@pytest.fixture
def group(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    """A separate group of all ranks, whose late streams wait for each other."""
    monkeypatch.setattr(LATE, "has_signals", True)
    ranks = comm.split(0)
    yield ranks
    ranks.close()


@pytest.fixture
def place(group: Any) -> Iterator[HostTensors]:
    yield from watched()


@pytest.mark.parametrize("name", ["top-2", "capacity", "gated", "parts", "expert choice"])
def test_equals_one_rank(group: Any, place: HostTensors, name: str) -> None:
    experts.check(group, Experts(6, hidden=10, **experts.OPTIONS[name]))


@pytest.mark.parametrize("chunks", [1, 2])
def test_ranks_may_have_different_numbers_of_tokens_eagerly(group: Any, place: HostTensors, chunks: int) -> None:
    options = Experts(6, hidden=10, balance="none", chunks=chunks)
    experts.check(group, options, rows=[4, 0, 1, 2], compiled=False)


def test_gradients_outside_of_the_traced_function(group: Any, place: HostTensors) -> None:
    """TensorFlow does not order these operations, and the nodes wait for each other."""
    layer = experts.build_model(Experts(6, hidden=10, balance="none"), group)
    x = tf.constant(experts.tokens(group, None)[group.rank])
    results = []
    for call in (layer, tf.function(layer)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.square(call(x, training=True)))
        results.append(tape.gradient(y, [x, *(variable.value for variable in layer.trainable_variables)]))
    for eager, traced in zip(*results, strict=True):
        np.testing.assert_allclose(eager, traced, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(min=2)
def test_rows_are_not_staged_in_host_memory(group: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their places and counts use host memory."""
    layer = MoE(Experts(6, hidden=10, balance="none"), group)
    layer.build((None, 200))
    x = np.ones((400, 200), np.float32)
    experts.step(layer, x, 0.0, True)
    staged: list[int] = []
    original = LATE.staging

    def staging(nbytes: int) -> Any:
        staged.append(nbytes)
        return original(nbytes)

    monkeypatch.setattr(LATE, "staging", staging)
    experts.step(layer, x, 0.0, True)
    # Equal rows may all go to one rank: 7 integers for each are 28 bytes, a tenth of its 800 bytes is 80.
    assert staged and max(staged) < group.size * x.nbytes / 10
