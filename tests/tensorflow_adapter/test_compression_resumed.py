"""Compressed training in Keras, saved and resumed in new objects."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from commlib_tensorflow.optimizer import DistributedOptimizer

from .test_compression import network, train, weights


def make(name: str) -> Any:
    """Return an optimizer as a new process has it, without state of earlier ones of its name."""
    return DistributedOptimizer(keras.optimizers.SGD(0.05), name="resumed", compression=name, compress_within_node=True)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "int4:rounding=stochastic",
        "qsgd",
        "sign",
        "topk:ratio=0.1",
        "randomk:ratio=0.1",
        "powersgd:rank=2",
        "dgc:ratio=0.1",
    ],
)
def test_a_resumed_run_is_the_same_to_the_last_bit(comm: Any, name: str) -> None:
    """Regression: the random streams of codecs restarted."""
    straight, stopped = network(), network()
    train(comm, straight, make(name), range(8))
    optimizer = make(name)
    train(comm, stopped, optimizer, range(5))
    state = optimizer.compression_state()
    again = make(name)
    again.load_compression_state(state)
    train(comm, stopped, again, range(5, 8))
    assert weights(straight) == weights(stopped)
