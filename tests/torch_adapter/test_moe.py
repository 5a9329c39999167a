"""A mixture of experts over some ranks is the same layer on one rank that has all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import Communicator
from commlib.expert import Experts
from commlib_torch.expert import auxiliary_loss
from tests.torch_adapter.expert_oracle import compare_gradients, layer, made, near, single, step, tokens


def check(comm: Communicator, options: Any, rows: list[int] | None = None, **kwargs: Any) -> None:
    xs = tokens(comm, rows=rows)
    model, whole = made(layer(options, **kwargs), comm), made(layer(options, **kwargs), single(comm))
    y, loss, of_x = step(model, xs[comm.rank])
    # The loss of one process is a mean over all tokens, those of ranks are over theirs, and are added up here.
    expected, whole_loss, of_all = step(whole, torch.cat(xs), float(comm.size))
    first = sum(len(x) for x in xs[: comm.rank])
    mine = slice(first, first + len(xs[comm.rank]))
    near(y, expected[mine], "outputs")
    if rows is None:
        mean = comm.all_reduce(loss.reshape(1).numpy(), "mean")
        near(torch.from_numpy(mean), whole_loss.reshape(1), "auxiliary loss")
    near(of_x, of_all[mine], "gradient of the inputs")
    compare_gradients(comm, model, whole)


OPTIONS: dict[str, Any] = {
    "top-1": {"top_k": 1},
    "top-2": {"top_k": 2},
    "top-3": {"top_k": 3},
    "sigmoid": {"top_k": 2, "scores": "sigmoid"},
    "gated": {"top_k": 2, "gated": True, "activation": "silu", "bias": False},
    "shared": {"top_k": 1, "shared": 2},
    "z": {"top_k": 2, "z_weight": 0.1},
    "global": {"top_k": 2, "balance": "global"},
    "capacity": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all"},
    "random": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all", "drop": "random"},
    "probable": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all", "drop": "probability"},
    "expert choice": {"top_k": 2, "choice": "expert", "capacity_over": "all", "balance": "none"},
    "groups": {"top_k": 2, "groups": 3, "max_groups": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_one_rank(comm: Communicator, name: str) -> None:
    check(comm, Experts(6, hidden=10, **OPTIONS[name]))


def test_other_numbers_of_tokens(comm: Communicator) -> None:
    """A rank may have no tokens at all; it takes part all the same."""
    check(comm, Experts(6, hidden=10, balance="none"), rows=[4, 0, 1, 2])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 7), nn.Linear(7, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def test_any_module(comm: Communicator) -> None:
    check(comm, Experts(6, top_k=2), expert=Own)


def test_experts_that_nobody_chose_have_zeros(comm: Communicator) -> None:
    model: Any = made(layer(Experts(6, top_k=1, hidden=4, balance="none")), comm)
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.weight[0] += 1
    x = torch.ones(3, 12, dtype=torch.float64)
    step(model, x)
    for parameter in model.experts.parameters():
        assert parameter.grad is not None
        if comm.size > 1 and comm.rank > 0:
            assert not parameter.grad.any()
    assert not auxiliary_loss(model).requires_grad
