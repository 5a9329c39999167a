"""Oracle: train the same model by plain torch in one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 4  # of a batch, per rank
FEATURES = 6


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small model, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        return layers.to(dtype)


def batch(comm: Any, step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The rows of all ranks: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = ROWS * comm.size
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def mine(comm: Any, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    rows = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    return tensors[0][rows], tensors[1][rows]


def loss_of(network: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    return (network(data[0]) - data[1]).square().mean()


def parameters_of(network: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def gradients_of(network: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in network.parameters()]


def assert_close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare (lists of) tensors; None only equals None."""
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, tolerance)
    elif expected is None or got is None:
        assert got is expected
    else:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def assert_same_everywhere(comm: Any, tensors: Sequence[Tensor | None]) -> None:
    """Check that every rank has the same bits."""
    bits = [None if t is None else t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    for other in comm.all_gather_object(bits):
        assert other == bits
