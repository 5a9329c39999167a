"""Oracle of mixtures of experts: the same layer on one rank, with all experts, and the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commlib import Communicator
from commlib_torch._shards import shard_of
from commlib_torch.expert import MoE, auxiliary_loss

WIDTH = 12
TOLERANCE = 2e-5
"""Gates are float32, and made of products of another number of rows: some roundings of 6e-8, summed over tokens."""


def single(comm: Communicator) -> Communicator:
    """Return the communicator of this rank alone. Collective."""
    group = comm.split(comm.rank, name="alone")
    assert group is not None
    return group


def tokens(comm: Communicator, *, rows: Sequence[int] | None = None, length: int = 5, seed: int = 0) -> list[Tensor]:
    """Return the tokens of each rank, [rows, length, WIDTH]. rows: their number on each rank, by default 3."""
    generator = torch.Generator().manual_seed(seed)
    counts = list(rows or [3] * comm.size)[: comm.size]
    return [torch.randn(count, length, WIDTH, generator=generator, dtype=torch.float64) for count in counts]


def build_layer(make: Callable[[Any], nn.Module], ranks: Any) -> nn.Module:
    torch.manual_seed(1)
    return make(ranks).double()


def step(model: nn.Module, x: Tensor, auxiliary: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, the auxiliary loss, and the gradient of the inputs for a loss that sums over tokens."""
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    y = model(x)
    loss = auxiliary_loss(model)
    ((y * torch.sin(3 * x.detach())).sum() + auxiliary * loss).backward()
    assert x.grad is not None
    return y.detach(), loss.detach(), x.grad


def near(got: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def compare_gradients(comm: Communicator, model: nn.Module, whole: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Sum gradients of replicated weights over ranks, and compare all with the layer that has all tokens."""
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient, other = parameter.grad.clone(), expected[name].grad
        assert other is not None
        shard = shard_of(parameter)
        if shard is None:
            comm.all_reduce(gradient.numpy(), out=gradient.numpy())
            near(gradient, other, name, tolerance)
        else:
            near(gradient, torch.from_numpy(shard.own(other.numpy())), name, tolerance)


def layer(options: Any, **kwargs: Any) -> Callable[[Any], nn.Module]:
    return lambda ranks: MoE(WIDTH, options, ranks, **kwargs)
