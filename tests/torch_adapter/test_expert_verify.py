"""Verification of mixtures against dense ones: valid ones pass, and a fault on one rank is named on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import Mesh
from commlib.errors import UsageError
from commlib.expert.experts import Experts
from commlib_torch import pipeline
from commlib_torch.expert import MoE, auxiliary_loss, expertize, verify

WIDTH = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, WIDTH))
        self.other = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.into(x)
        x = x + self.mlp(x)
        return self.out(x + self.other(x)), x


def batch(comm: Any, dtype: Any = torch.float64) -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(comm.rank), dtype=dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden": {"hidden": 4, "gated": True, "shared": 1, "top_k": 3},
    "capacity": {"capacity_factor": 0.75, "capacity_over": "all"},
    "sigmoid": {"scores": "sigmoid", "scale": 2.5, "groups": 2, "max_groups": 1, "bias_rate": 0.1},
    "expert choice": {"choice": "expert", "hidden": 4},
    "chunks": {"chunks": 2, "hidden": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_valid_mixtures_pass(comm: Any, name: str) -> None:
    """They leave no trace: statistics, losses, gradients, random numbers and modes are unchanged."""
    options = {"count": 4 * comm.size, "top_k": 2, **OPTIONS[name]}
    model: Any = Model().double()
    torch.manual_seed(comm.rank)
    plan = {"mlp": Experts(**options), "other": Experts(**{**options, "top_k": 1})}
    expertize(model, comm, plan, **{"example" if name == "plain" else "verify": batch(comm)})
    before = torch.get_rng_state()
    verify(model, batch(comm))
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert float(auxiliary_loss(model)) == 0 and model.training and model.mlp.training
    assert model.mlp.stats().tokens == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("option", ["verify", "example"])
def test_copies_of_one_mlp_pass(comm: Any, option: str, dtype: Any) -> None:
    """Regression: the router's gradient is zero except for rounding, and was reported to differ entirely."""
    plan = {"mlp": Experts(2 * comm.size, copy=True)}
    expertize(Model().to(dtype), comm, plan, **{option: batch(comm, dtype)})


def test_along_tensor_parallelism(comm: Any) -> None:
    mesh = Mesh(dp=-1, tp=2 if comm.size % 2 == 0 else 1)
    layer = MoE(WIDTH, Experts(4, hidden=6), mesh).double()
    verify(layer, torch.ones(5, WIDTH, dtype=torch.float64) * torch.arange(5)[:, None])
    mesh.close()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ("row", "the output of mlp differs from a dense mixture's"),
        ("gradient", "the gradient of .* differs"),
    ],
)
def test_a_fault_is_named(comm: Any, spoil: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the layer or weight, the difference and the ranks; the model is unchanged."""
    plain = MoE.forward

    def forward(self: Any, x: Tensor, mask: Any = None) -> Tensor:
        out: Tensor = plain(self, x, mask)
        mixed = vars(MoE)["mixed"].__qualname__ == "MoE.mixed"  # not the dense one
        if comm.rank != comm.size - 1 or not mixed:
            return out
        return out * 1.001 if spoil == "row" else out + 0.01 * (x - x.detach())

    monkeypatch.setattr(MoE, "forward", forward)
    model: Any = Model().double()
    modules = dict(model.named_modules())
    with pytest.raises(UsageError, match=rf"{text}.*on rank {comm.size - 1} of {comm.size}"):
        expertize(model, comm, {"mlp": Experts(2 * comm.size)}, verify=batch(comm))
    assert dict(model.named_modules()) == modules


def test_a_model_without_experts(comm: Any) -> None:
    with pytest.raises(UsageError, match="no mixture of experts"):
        verify(Model(), batch(comm))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("option", ["verify", "example"])
def test_a_pipeline_of_mixtures_is_compared(comm: Any, option: str) -> None:
    """Regression: it was refused, because the exchange of rows was taken for state shared by layers."""
    torch.manual_seed(0)
    stages = comm.size if comm.size % 2 else 2
    mlps = [nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(stages)]
    mesh = Mesh(pp=stages, dp=-1)
    model = expertize(nn.Sequential(*mlps).double(), mesh, {f"[0-{stages - 1}]": Experts(count=2 * mesh["dp"].size)})
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given: Any = {option: {"verify": (x, x), "example": x[:2]}[option]}
    pipe = pipeline(model, mesh["pp"], microbatches=2, loss=nn.MSELoss(), **given)
    assert torch.isfinite(pipe.step(x, x))
    pipe.close()
