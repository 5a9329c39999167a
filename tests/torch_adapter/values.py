"""Tensors for tests of the verbs: small whole numbers that differ between ranks and are exact in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda base: base,
    "transposed": lambda base: base.t(),
    "strided": lambda base: base[::2, 1:],
    "one row": lambda base: base[1:2],
    "empty": lambda base: base[:0],
    "no columns": lambda base: base[:, :0],
}


def of(rank: int, dtype: torch.dtype = torch.float32, rows: int = 6, columns: int = 3) -> Tensor:
    """Return the tensor of a rank."""
    numbers = torch.arange(rows * columns).reshape(rows, columns) % 5 + rank
    if dtype.is_complex:
        return (numbers + 1j * (numbers % 3)).to(dtype)
    return (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)


def everyone(comm: Any, dtype: torch.dtype = torch.float32, form: str = "plain") -> list[Tensor]:
    """Return the tensors of all ranks."""
    return [FORMS[form](of(rank, dtype)) for rank in range(comm.size)]


def check(got: Any, expected: Tensor) -> None:
    """Check values, shape and dtype to the last bit."""
    assert isinstance(got, Tensor)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected), (got, expected)


def share(rows: int, size: int, rank: int) -> slice:
    """Return the rows of a reduce-scatter that a rank receives."""
    start = rank * (rows // size) + min(rank, rows % size)
    return slice(start, start + rows // size + (rank < rows % size))
