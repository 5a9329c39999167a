"""Models that differ among ranks: `parallelize` silently accepted them if weights had the same shapes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import MismatchError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_torch.tensor import parallelize

PLAN: Plan = {"0": Column(), "2": Row()}
OWN: Plan = {"up": Column(), "down": Row()}


class Own(nn.Module):
    def __init__(self, act: Any = F.relu, scale: float = 0.1, **options: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.act, self.scale = act, scale
        vars(self).update(options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)) * self.scale)
        return out


class OwnDropout(nn.Dropout):
    pass


def build(between: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4))


def either(rank: int, *two: Any) -> Any:
    return two[min(rank, 1)]


DIFFERENT: dict[str, tuple[Any, str]] = {
    "a module": (lambda r: either(r, nn.ReLU(), nn.GELU()), "module 1, ReLU.*GELU"),
    "a slope": (lambda r: nn.LeakyReLU(either(r, 0.1, 0.3)), "module 1, LeakyReLU: negative_slope=0.1"),
    "a rate": (lambda r: nn.Dropout(either(r, 0.1, 0.3)), "module 1, Dropout: p=0.1"),
    "a way": (lambda r: nn.GELU(either(r, "none", "tanh")), "module 1, GELU: approximate='none'"),
    "of one's own": (lambda r: OwnDropout(either(r, 0.1, 0.3)), "module 1, OwnDropout: .*p=0.1"),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_models(comm: Any, name: str) -> None:
    make, text = DIFFERENT[name]
    model = build(make(comm.rank))
    with pytest.raises(MismatchError, match=f"parallelize: .*{text}"):
        parallelize(model, comm, PLAN)
    assert type(model[0]) is nn.Linear


@pytest.mark.ranks(min=2)
def test_frozen_weights_are_compared(comm: Any) -> None:
    model = build(nn.ReLU())
    model[0].weight.requires_grad_(comm.rank == 0)
    with pytest.raises(MismatchError, match="module 0, Linear: frozen="):
        parallelize(model, comm, PLAN)


@pytest.mark.ranks(min=2)
def test_a_buffer_of_another_shape(comm: Any) -> None:
    model = Own()
    model.register_buffer("seen", torch.zeros(3 + min(comm.rank, 1)), persistent=False)
    with pytest.raises(MismatchError, match=r"parallelize: .*seen: torch\.float32\[3\]"):
        parallelize(model, comm, OWN)


@pytest.mark.ranks(min=2)
def test_numbers_of_heads_are_compared(comm: Any) -> None:
    """The weights have the same shapes."""
    model = nn.TransformerEncoderLayer(4 * comm.size, either(comm.rank, comm.size, 2 * comm.size), 8)
    with pytest.raises(MismatchError, match=f"self_attn, MultiheadAttention: num_heads={comm.size}"):
        parallelize(model, comm, {"self_attn": Column()})


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "both",
    [{"act": (F.relu, F.gelu)}, {"act": (partial(F.elu, alpha=0.1), partial(F.elu, alpha=0.2))}, {"scale": (0.1, 0.2)}],
    ids=["a function", "a part of one", "a number"],
)
def test_settings_of_user_modules(comm: Any, both: dict[str, Any]) -> None:
    """They may be intended, which cannot be detected, so rank 0 warns."""
    model = Own(**{name: either(comm.rank, *two) for name, two in both.items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, comm, OWN)
    messages = [str(one.message) for one in caught if "ranks hold different models" in str(one.message)]
    assert len(messages) == (comm.rank == 0)
    assert all(f"the model, Own: {next(iter(both))} is " in text and "on rank 1 of" in text for text in messages)


def test_some_settings_may_differ(comm: Any) -> None:
    """The mode and rank-dependent settings may differ; a second axis has different shapes."""
    model = Own(rank=comm.rank, loud=comm.rank == 0, place=f"cuda:{comm.rank}").train(comm.rank == 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, comm, {"up": Column(gather=True)})
        parallelize(model, comm, {"down": Column(gather=True)})
    assert not [str(one.message) for one in caught if "different" in str(one.message)]
    assert model(torch.zeros(2, 4)).shape == (2, 4)
