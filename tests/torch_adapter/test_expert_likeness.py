"""Models that get experts: other weights are broadcast from rank 0, and the structure is compared."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch import DistributedOptimizer, broadcast_parameters, gather_state_dict
from commlib_torch.expert import auxiliary_loss, expertize
from tests.torch_adapter.expert_oracle import near, single

WIDTH = 8


class Model(nn.Module):
    drawn: Tensor

    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.mlp = mlp or nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.register_buffer("drawn", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(torch.tanh(self.first(x)) * self.drawn)
        return out


def seeded(seed: int, mlp: nn.Module | None = None) -> Any:
    torch.manual_seed(seed)
    return Model(mlp).double()


def plan(comm: Communicator, **options: Any) -> dict[str, Experts]:
    return {"mlp": Experts(2 * comm.size, **options)}


def batch(seed: int) -> Tensor:
    return torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("broadcasts", [False, True])
def test_ranks_with_different_seeds_train_the_model_of_rank_0(comm: Communicator, broadcasts: bool) -> None:
    """Regression: besides the shared experts, ranks silently kept different weights."""

    def train(model: Any, rows: Any, **where: Any) -> Any:
        if where and broadcasts:
            broadcast_parameters(model.state_dict(), root=0)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if where:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), **where)
        for number in range(2):
            x = rows(number)
            (F.mse_loss(model(x), torch.sin(x)) + auxiliary_loss(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    options = {"balance": "none"}
    torch.manual_seed(3)
    whole = expertize(seeded(0), single(comm), plan(comm, **options))
    mesh = Mesh(dp=-1)
    own = expertize(seeded(comm.rank), mesh, plan(comm, **options))
    for name, value in gather_state_dict(own).items():
        assert torch.equal(value, whole.state_dict()[name]), name
    assert torch.equal(own.drawn, whole.drawn)
    train(whole, lambda number: torch.cat([batch(10 * number + rank) for rank in range(comm.size)]))
    train(own, lambda number: batch(10 * number + comm.rank), mesh=mesh)
    for name, value in gather_state_dict(own).items():
        near(value, whole.state_dict()[name], name)
    mesh.close()


@pytest.mark.ranks(min=2)
def test_weights_are_restored_if_verify_refuses(comm: Communicator) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.calls = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            out: Tensor = self.down(F.gelu(self.up(x)))
            return out * self.calls[0]

    plain = seeded(comm.rank, Odd())
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(UsageError, match="differs from a dense mixture's"):
        expertize(plain, comm, plan(comm), verify=batch(comm.rank))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, before[name]), name


class Scaled(nn.Module):
    """An MLP whose forward uses its attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)


def test_structures_of_models_are_compared(comm: Communicator) -> None:
    """Regression: strings, integers and tensors of MLPs, and all but shapes of the rest, were not compared."""
    if comm.size == 1:
        return
    odd = int(comm.rank == 1)
    other = seeded(0)
    other.norm.momentum = 0.1 + 0.1 * odd
    with pytest.raises(MismatchError, match="module norm, BatchNorm1d"):
        expertize(other, comm, plan(comm))
    with pytest.raises(MismatchError, match=r"mlp: tensor alpha"):
        expertize(seeded(0, Scaled(alpha=torch.full((WIDTH,), 1.0 + odd))), comm, plan(comm))
    for name, values in {"act": ("tanh", "relu"), "times": (1, 2), "shape": ((1, 2), (2, 1))}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            expertize(seeded(0, Scaled(**{name: values[odd]})), comm, plan(comm))
        messages = [str(one.message) for one in caught if "ranks hold different models" in str(one.message)]
        assert len(messages) == (comm.rank == 0), caught
        if messages:
            assert f"expertize: module mlp, Scaled: {name} is {values[0]!r} on rank 0 and {values[1]!r}" in messages[0]
    act = (nn.GELU(), nn.Tanh())[odd]
    expertize(seeded(0, nn.Sequential(nn.Linear(WIDTH, 12), act, nn.Linear(12, WIDTH))), comm, plan(comm, hidden=3))
