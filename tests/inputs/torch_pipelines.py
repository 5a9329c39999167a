"""What tests of PyTorch's pipelines have in common: numbers that are exact, and a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

WIDTH = 6


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Let what a test makes be of float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch(rows: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return x and y, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
