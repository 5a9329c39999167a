"""Common parts of tests of PyTorch's pipelines: numbers that are exact, and a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

WIDTH = 6


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Make a test create float64 tensors."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch(rows: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return x and y, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
