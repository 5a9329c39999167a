"""Shapes of divided weights used as numbers in a model: results were silently wrong.

The oracle is one process: an earlier copy of the model.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_torch.tensor import parallelize
from tests.torch_adapter.pairs import is_right

PLAN: Plan = {"up": Column(), "down": Row()}
LINE = r"(the shape of its weight).*test_tensor_weight_shapes\.py:\d+.*read units or out_features of the layer"

WRONG: dict[str, Any] = {
    "shape": lambda model, h: h / model.up.weight.shape[0],
    "size": lambda model, h: h / model.down.weight.size(1) ** 0.5,
    "a bias": lambda model, h: h + model.up.bias.shape[0],
    "numel": lambda model, h: h + model.up.weight.numel() / 100,
    "all of them": lambda model, h: h + sum(weight.numel() for weight in model.parameters()) / 100,
}
RIGHT: dict[str, Any] = {
    "reshapes": lambda model, h: h.reshape(-1, model.up.weight.shape[0]).view(*h.shape[:-1], model.down.weight.size(1)),
    "features": lambda model, h: h / model.up.out_features,
    "what is whole": lambda model, h: h / (model.down.bias.shape[0] + model.down.weight.shape[0]),
}


class Asking(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 12), nn.Linear(12, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.down(self.function(self, self.up(x)))


@pytest.fixture
def tp(comm: Any) -> Any:
    return commlib.Mesh(tp=comm.size)["tp"]


def build(function: Any) -> Asking:
    torch.manual_seed(3)
    return Asking(function).double()


def rows() -> Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("name", WRONG)
def test_a_number_is_refused(tp: Any, name: str) -> None:
    """With example= it is refused before anything is divided, else at the first call, or by the results of verify=."""
    with pytest.raises(UsageError, match=LINE):
        parallelize(build(WRONG[name]), tp, PLAN, example=rows())
    divided = parallelize(build(WRONG[name]), tp, PLAN)
    for _ in range(2):
        with pytest.raises(UsageError, match=LINE):
            divided(rows())
    with pytest.raises(UsageError, match="differs"):
        parallelize(build(WRONG[name]), tp, PLAN, verify=rows())
    with pytest.raises(UsageError, match="finds no layer"):
        parallelize(build(WRONG[name]), tp, "auto", example=rows(), report=lambda table: None)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("name", RIGHT)
def test_valid_uses_are_accepted(tp: Any, name: str) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"example": rows()}, {"verify": rows()})
    for options in ways:
        model = build(RIGHT[name])
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(model, tp, PLAN, **options)
            is_right(plain, model, rows())


@pytest.mark.ranks(min=2, max=3)
def test_an_input_that_is_a_part(tp: Any) -> None:
    """The input is already a part: a number that belongs to the whole reveals the error."""
    model = parallelize(build(WRONG["shape"]), tp, {"up": Column(sequence=1), "down": Row(sequence=1)})
    part = rows().chunk(tp.size, 1)[tp.rank]
    with pytest.raises(UsageError, match=r"differs from the unsharded model's.*the shape of its weight"):
        model(part)
