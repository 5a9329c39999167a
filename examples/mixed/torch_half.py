"""Train one model in two frameworks at once: this rank in PyTorch, another one in TensorFlow.

    mpirun -n 1 python examples/mixed/torch_half.py : -n 1 python examples/mixed/tf_half.py

Both halves begin with the same weights and train on their rows of the same batches. One all-reduce by name combines the
gradients of both frameworks, and its result has the same bits on every rank. A step is then one multiplication and one
subtraction in float32 in each framework, so the weights stay equal bit for bit. The exit code is 0 only if they do, and
if the loss has fallen.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

import commlib_torch as hvd

STEPS, ROWS, FEATURES, HIDDEN = 200, 16, 8, 32
LEARNING_RATE = 0.1


def main() -> int:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(0)  # the same numbers, in the same order, in both halves
    shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    initial = [(random.normal(size=shape) * 0.3).astype(np.float32) for shape in shapes]
    secret = random.normal(size=(FEATURES, 1))
    weights = [torch.from_numpy(array).requires_grad_() for array in initial]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3] - y).square().mean()

    losses = []
    for _ in range(STEPS):
        x = random.normal(size=(size * ROWS, FEATURES)).astype(np.float32)
        y = np.tanh(x @ secret).astype(np.float32)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        loss = loss_of(torch.from_numpy(x[mine]), torch.from_numpy(y[mine]))
        gradients = hvd.grouped_allreduce(list(torch.autograd.grad(loss, weights)), name="gradients")
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= LEARNING_RATE * gradient
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))

    everyone = hvd.allgather_object([weight.detach().numpy().tobytes() for weight in weights], name="weights")
    equal = all(other == everyone[0] for other in everyone)
    fell = losses[-1] < 0.2 * losses[0]
    print(f"rank {rank}, PyTorch {torch.__version__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"rank {rank}: weights of {size} ranks are {'equal bit for bit' if equal else 'NOT EQUAL'}")
    hvd.shutdown()
    return 0 if equal and fell else 1


if __name__ == "__main__":
    sys.exit(main())
