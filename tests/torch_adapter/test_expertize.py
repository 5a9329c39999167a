"""MLPs of plain models become mixtures of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch import DistributedOptimizer, gather_state_dict
from commlib_torch.expert import MoE, auxiliary_loss, expertize
from tests.torch_adapter.expert_oracle import near, single

WIDTH = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, sequential: bool) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mlp": mlp if sequential else MLP()}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))  # type: ignore[index]
        return x


def model(sequential: bool = False) -> Any:
    torch.manual_seed(0)
    return Model(sequential).double()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sequential", [False, True])
def test_copies_compute_what_the_dense_model_did(comm: Communicator, sequential: bool) -> None:
    """Gates of a token add up to 1, so its equal experts together are the dense MLP."""
    plain = model(sequential)
    own = expertize(model(sequential), comm, {"layers.*.mlp": Experts(4 * comm.size, top_k=2, copy=True)})
    assert isinstance(own.layers[0]["mlp"], MoE)
    x = batch(comm.rank)
    near(own(x), plain(x), "outputs", 1e-6)
    auxiliary_loss(own)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("hidden", [None, 10])
def test_trains_as_on_one_rank(comm: Communicator, sequential: bool, hidden: int | None) -> None:
    plan = {"layers.*.mlp": Experts(2 * comm.size, top_k=2, hidden=hidden, shared=1 if hidden else 0)}

    def train(ranks: Any, batches: Any, **where: Any) -> Any:
        torch.manual_seed(3)
        made = expertize(model(sequential), ranks, plan)
        optimizer: Any = torch.optim.SGD(made.parameters(), 0.1)
        if where:
            optimizer = DistributedOptimizer(optimizer, made.named_parameters(), **where)
        for number in range(2):
            x = batches(number)
            (F.mse_loss(made(x), torch.sin(x)) + auxiliary_loss(made)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return made

    def all_rows(number: int) -> Tensor:
        return torch.cat([batch(10 * number + rank) for rank in range(comm.size)])

    whole = train(single(comm), all_rows)
    mesh = Mesh(dp=-1)
    own = train(mesh, lambda number: batch(10 * number + comm.rank), mesh=mesh)
    for name, value in gather_state_dict(own).items():
        near(value, whole.state_dict()[name], name)
    mesh.close()


def test_a_mesh_need_not_say_how_experts_are_divided(comm: Communicator) -> None:
    """Of dp, as many ranks share the experts as divide both; the others have copies."""
    mesh = Mesh(dp=-1)
    own = expertize(model(), mesh, {"layers.*.mlp": Experts(2)})
    expected = {1: 1, 2: 2, 3: 1, 4: 2}[comm.size]
    assert own.layers[0]["mlp"].mixture.ranks.axis.size == expected
    assert own.layers[0]["mlp"].mixture.ranks is own.layers[1]["mlp"].mixture.ranks
    mesh.close()


def test_refusals(comm: Communicator) -> None:
    plain = model()
    with pytest.raises(UsageError, match=r"no layer is called 'layers\.\*\.mpl'"):
        expertize(plain, comm, {"layers.*.mpl": Experts(4)})
    with pytest.raises(UsageError, match="expected an MLP"):
        expertize(plain, comm, {"layers.*.norm": Experts(4)})
    with pytest.raises(UsageError, match=r"copy=True or hidden="):
        expertize(plain, comm, {"layers.*.mlp": Experts(4, copy=True, hidden=3)})
    assert isinstance(plain.layers[0]["mlp"], MLP)
    if comm.size > 1:
        with pytest.raises(UsageError, match="every rank needs at least one"):
            expertize(plain, comm, {"layers.*.mlp": Experts(1, top_k=1)})
        with pytest.raises(MismatchError):
            expertize(plain, comm, {"layers.*.mlp": Experts(4 + 4 * (comm.rank == 1))})
