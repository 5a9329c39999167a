"""Module state besides weights and buffers is broadcast from rank 0 or reported; that of MLPs is compared."""

from __future__ import annotations

import re
import types
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch.expert import expertize

WIDTH = 8


@dataclass
class Table:
    values: Any


class Own:
    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values


def _closed(values: Any) -> Any:
    def get() -> Any:
        return values

    return get


PUT = {
    "attribute": lambda v: v,
    "list": lambda v: [0, v],
    "tuple": lambda v: (v,),
    "dict": lambda v: {"a": {"b": v}},
    "namespace": lambda v: types.SimpleNamespace(a=v),
    "dataclass": Table,
    "slots": Own,
    "closure": _closed,
}


def _taken(kept: Any) -> Any:
    """Return the stored values."""
    while not isinstance(kept, Tensor | np.ndarray | float):
        if isinstance(kept, dict):
            kept = next(iter(kept.values()))
        elif isinstance(kept, list | tuple):
            kept = kept[-1]
        elif callable(kept):
            kept = kept()
        else:
            kept = kept.a if hasattr(kept, "a") else kept.values
    return kept


class Features(nn.Module):
    def __init__(self, kept: Any, name: str = "kept") -> None:
        super().__init__()
        self.name = name
        setattr(self, name, kept)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.as_tensor(_taken(getattr(self, self.name)))


def model(kept: Any, name: str = "kept") -> Any:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
    return nn.Sequential(Features(kept, name), mlp).double()


def plan(comm: Communicator, **options: Any) -> dict[str, Experts]:
    return {"1": Experts(2 * comm.size, **options)}


def drawn(rank: int) -> Tensor:
    return torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("name", ["kept", "_kept"])
@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
@pytest.mark.parametrize("put", PUT)
def test_tensors_and_arrays_are_broadcast_from_rank_0(comm: Communicator, put: str, kind: Any, name: str) -> None:
    """Regression: each rank silently kept its own random features."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = expertize(model(PUT[put](kind(drawn(comm.rank))), name), comm, plan(comm))
    np.testing.assert_array_equal(_taken(getattr(built[0], name)), drawn(0))
    expected = expertize(model(drawn(0)), comm, plan(comm))
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9 + comm.rank))
    torch.testing.assert_close(built(x), expected(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.bool, torch.complex128]
)
def test_values_of_any_dtype_are_broadcast_from_rank_0(comm: Communicator, dtype: Any) -> None:
    values = [
        (torch.arange(6).reshape(2, 3) + rank).remainder(2 if dtype is torch.bool else 9).to(dtype).t()
        for rank in (0, 1)
    ]
    built = expertize(model(values[comm.rank % 2].clone()), comm, plan(comm))
    assert torch.equal(built[0].kept, values[0])


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("values", "name"),
    [
        (lambda odd: [0.5 + odd], r"0: kept is list of 1: 0\.5 on rank 0 and list of 1: 1\.5 on rank 1"),
        (lambda odd: [3 + odd, 1], r"0: kept is list of 2: 3, 1 on rank 0"),
        (lambda odd: {"a": 0.5 + odd}, r"0: kept\['a'\] is 0\.5 on rank 0 and 1\.5"),
        (lambda odd: types.SimpleNamespace(scale=0.5 + odd), r"0: kept\.scale is 0\.5 on rank 0"),
        (lambda odd: [torch.ones(1 + odd)], r"0: kept\[0\] is tensor float32\[1\] on rank 0 and tensor float32\[2\]"),
        (lambda odd: [torch.ones(1)] * odd, r"0: kept\[0\] is nothing on rank 0 and tensor float32\[1\] on rank 1"),
        (lambda odd: torch.full((1,), 1.0 + odd).expand(3), r"0: kept \(tensor float32\[3\]\) has different values"),
        (lambda odd: torch.full((3,), 1.0 + odd).to_sparse(), r"0: kept \(tensor float32\[3\]\) has different values"),
    ],
)
def test_a_value_that_cannot_be_broadcast_is_warned_of(comm: Communicator, values: Any, name: str) -> None:
    odd = int(comm.rank == 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expertize(model(values(odd)), comm, plan(comm))
    messages = [str(one.message) for one in caught if "ranks hold different models" in str(one.message)]
    assert len(messages) == (comm.rank == 0), caught
    for text in messages:
        assert re.search(f"expertize: module {name}", text), text


def test_values_that_identify_the_rank_cause_no_warning(comm: Communicator) -> None:
    """Users would learn to ignore such a warning."""
    for own in (
        comm.rank,
        [comm.rank],
        {"rank": comm.rank},
        f"cuda:{comm.rank}",
        types.SimpleNamespace(rank=comm.rank),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expertize(model(own), comm, plan(comm))


@pytest.mark.ranks(min=2)
def test_values_are_restored_if_verify_refuses(comm: Communicator) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.calls = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            return self.down(F.gelu(self.up(x))) * self.calls[0]  # type: ignore[no-any-return]

    plain = model({"a": drawn(comm.rank)})
    plain[1] = Odd().double()
    with pytest.raises(UsageError, match="differs from a dense mixture's"):
        expertize(plain, comm, plan(comm), verify=torch.stack([drawn(9 * comm.rank + row) for row in range(6)]))
    assert torch.equal(plain[0].kept["a"], drawn(comm.rank))


class Random(nn.Module):
    table = drawn(0)

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), kept

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x) * _taken(self.kept)))
        return out


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("put", PUT)
def test_state_of_mlps_is_compared(comm: Communicator, put: str) -> None:
    """Regression: tensors in containers of MLPs were not compared, so that experts of one mixture differed."""
    odd = int(comm.rank == 1)
    for value in (torch.full((1,), 1.0 + odd), np.full(1, 1.0 + odd)):
        built = model(None)
        built[1] = Random(PUT[put](value)).double()
        with pytest.raises(MismatchError, match=r"1: (tensor|array) kept"):
            expertize(built, comm, plan(comm))
