"""A mixture of experts that is trained by PyTorch, then by Keras on another number of ranks, and by PyTorch again."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
import torch

import commlib
import commlib_tensorflow as ct_keras
import commlib_torch as ct_torch
from commlib import Communicator
from commlib.errors import UsageError
from commlib.expert import Experts

WIDTH, ROWS = 8, 12
OPTIONS = Experts(4, top_k=2, hidden=6, shared=1, gated=True, activation="silu", balance="none")


def batch(number: int) -> Any:
    return np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)


def own(x: Any, comm: Communicator) -> Any:
    return np.split(x, comm.size)[comm.rank]


class InTorch:
    def __init__(self, comm: Communicator, adam: bool) -> None:
        torch.manual_seed(0)
        self.comm, self.layer = comm, ct_torch.MoE(WIDTH, OPTIONS, comm)
        adam_optimizer = torch.optim.Adam(self.layer.parameters(), 0.01, eps=1e-7) if adam else None
        plain = adam_optimizer or torch.optim.SGD(self.layer.parameters(), 0.01, momentum=0.9)
        self.optimizer: Any = ct_torch.DistributedOptimizer(plain, self.layer.named_parameters(), ranks=comm)

    def train(self, number: int) -> None:
        x = torch.from_numpy(own(batch(number), self.comm))
        torch.nn.functional.mse_loss(self.layer(x), torch.sin(x)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outputs(self) -> Any:
        with torch.no_grad():
            return self.comm.all_gather(self.layer(torch.from_numpy(own(batch(99), self.comm))).numpy())

    def save(self, path: Path) -> None:
        ct_torch.save_experts(path, self.layer, self.optimizer)

    def load(self, path: Path) -> None:
        ct_torch.load_experts(path, self.layer, self.optimizer)


class InKeras:
    def __init__(self, comm: Communicator, adam: bool) -> None:
        random.seed(7)
        self.comm, self.layer = comm, ct_keras.MoE(OPTIONS, comm, name="one")
        self.model = keras.Sequential([keras.Input((WIDTH,)), self.layer])
        self.optimizer: Any = keras.optimizers.Adam(0.01) if adam else keras.optimizers.SGD(0.01, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)

    def train(self, number: int) -> None:
        x = tf.constant(own(batch(number), self.comm))
        with ct_keras.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((self.model(x, training=True) - tf.sin(x)) ** 2)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.comm.size == 1:  # the tape is shared by all ranks
            return
        self.optimizer.apply(gradients, variables)

    def train_alone(self, number: int) -> None:
        x = tf.constant(batch(number))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x, training=True) - tf.sin(x)) ** 2)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    def outputs(self) -> Any:
        return self.comm.all_gather(self.model(own(batch(99), self.comm)).numpy())

    def save(self, path: Path) -> None:
        ct_keras.save_experts(path, self.model, self.optimizer)

    def load(self, path: Path) -> None:
        ct_keras.load_experts(path, self.model, self.optimizer)


def main() -> None:
    comm = commlib.init()
    alone = comm.split(comm.rank)
    assert alone is not None
    folder = Path(sys.argv[1])
    for adam in (True, False):
        trained_by_torch = folder / f"{adam}"
        first = InTorch(comm, adam)
        for number in range(3):
            first.train(number)
        first.save(trained_by_torch)
        # On one rank, in Keras, which continues as PyTorch does.
        second = InKeras(alone, adam)
        second.load(trained_by_torch)
        np.testing.assert_allclose(second.outputs(), first.outputs(), rtol=1e-4, atol=1e-5)
        for number in range(3, 6):
            first.train(number)
            second.train_alone(number)
        np.testing.assert_allclose(second.outputs(), first.outputs(), rtol=1e-3, atol=1e-4)
        # From there back to PyTorch and Keras, on all ranks.
        trained_by_keras = folder / f"{adam} {comm.rank}"
        second.save(trained_by_keras)
        third, fourth = InTorch(comm, adam), InKeras(comm, adam)
        for one in (third, fourth):
            one.load(trained_by_keras)
            np.testing.assert_allclose(one.outputs(), first.outputs(), rtol=1e-3, atol=1e-4)
        for one in (first, third, fourth):
            one.train(6)
        for one in (third, fourth):
            np.testing.assert_allclose(one.outputs(), first.outputs(), rtol=1e-3, atol=1e-4)
    other_layer = ct_torch.MoE(WIDTH, Experts(2, hidden=6), alone)
    try:
        ct_torch.load_experts(folder / "True", other_layer)
    except UsageError as error:
        assert "router has shape [4, 8], expected [2, 8]" in str(error), error
    else:
        raise AssertionError("another model was loaded")
    print(f"rank {comm.rank}: ok")


if __name__ == "__main__":
    main()
