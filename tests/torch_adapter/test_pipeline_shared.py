"""State shared by stages on several ranks: weights stay equal, frozen or not; buffers do, or are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline

WIDTH = 4


class Tied(nn.Module):
    """A model whose head uses the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embed(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def set_trains(model: nn.Module, name: str, trains: bool) -> None:
    """Freeze or unfreeze a parameter on ranks that have it."""
    for result, parameter in model.named_parameters(remove_duplicate=False):
        if result == name:
            parameter.requires_grad_(trains)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_tied_weight_may_be_frozen_and_unfrozen(comm: Any, schedule: Any) -> None:
    """Regression: a frozen one got a zero gradient, and so weight decay. A name may exist on one rank only."""
    torch.manual_seed(0)
    whole = Tied().double()
    whole.embed.weight.requires_grad_(False)
    pipe = pipeline(copy.deepcopy(whole), comm, schedule=schedule, microbatches=2, loss=F.cross_entropy)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (pipe, whole))
    words = torch.arange(8) % 7
    changes = {1: ("embed.weight", True), 3: ("head.weight", False), 4: ("embed.weight", True)}
    for step in range(6):
        if step in changes:
            for model in (whole, pipe):
                set_trains(model, *changes[step])
        expected = F.cross_entropy(whole(words), words)
        torch.testing.assert_close(pipe.step(words, words), expected.detach(), rtol=1e-12, atol=0)
        expected.backward()
        theirs_by_name = dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in pipe.named_parameters(remove_duplicate=False):
            other = theirs_by_name[name]
            assert (parameter.grad is None) == (other.grad is None) and parameter.requires_grad == other.requires_grad
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for name, value in pipe.gather_state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-10, atol=1e-10)
    pipe.close()


def test_an_unused_tied_weight_has_no_gradient(comm: Any) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            self.shared = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x * self.own
            return out * self.shared if x.shape[0] == 3 else out

    layers = [Sometimes() for _ in range(2 * comm.size)]
    for layer in layers:
        layer.shared = layers[0].shared
    pipe = pipeline(layers, comm, microbatches=2, loss=F.mse_loss)
    for rows, has in ((8, False), (6, True), (8, True)):
        pipe.step(torch.ones(rows, WIDTH).double(), torch.zeros(rows, WIDTH).double())
        for name, parameter in pipe.named_parameters():
            assert (parameter.grad is not None) == (has or "own" in name)
    pipe.close()


class SparseTied(Tied):
    def forward(self, words: Tensor) -> Tensor:
        x = F.embedding(words, self.embed.weight, sparse=True)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def test_a_tied_weight_with_one_sparse_gradient(comm: Any) -> None:
    """Regression: the rank of that use raised an error, and the other one waited until COMMLIB_TIMEOUT."""
    torch.manual_seed(0)
    whole = SparseTied().double()
    pipe = pipeline(copy.deepcopy(whole), comm, microbatches=2, loss=F.cross_entropy)
    words = torch.arange(8) % 7
    for _ in range(2):  # the second pass accumulates
        torch.testing.assert_close(pipe.step(words, words), F.cross_entropy(whole(words), words), rtol=1e-12, atol=0)
        F.cross_entropy(whole(words), words).backward()
    others = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-10, atol=1e-10)
    pipe.close()


def test_a_tied_weight_stays_tied_when_parameters_are_replaced(comm: Any) -> None:
    """Regression: the gradients of new parameters, made by `assign=True`, were not summed."""
    torch.manual_seed(0)
    whole = Tied().double()
    state = copy.deepcopy(whole.state_dict())
    pipe = pipeline(Tied().double(), comm, schedule="1f1b", microbatches=2, loss=F.cross_entropy)
    pipe.load_state_dict(state, assign=True)
    words = torch.arange(8) % 7
    pipe.step(words, words)
    F.cross_entropy(whole(words), words).backward()
    by_name = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, by_name[name].grad, rtol=1e-10, atol=1e-12)
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
    torch.testing.assert_close(pipe.clip_grad_norm(1.0).double(), norm, rtol=1e-6, atol=0)
    pipe.close()


class Counted(nn.Module):
    """Adds a table, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.calls: Tensor
        self.register_buffer("table", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.table


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", [Counted, lambda: nn.BatchNorm1d(WIDTH)], ids=["own", "batch norm"])
def test_a_buffer_changed_on_two_ranks_is_refused(comm: Any, kind: Any) -> None:
    """Regression: each rank's copy saw only its own uses: running statistics covered some of them."""
    shared = kind()
    layers = [shared, *(nn.Linear(WIDTH, WIDTH) for _ in range(2 * comm.size)), shared]
    pipe = pipeline(layers, comm, microbatches=2, loss=F.mse_loss)
    x = torch.randn(8, WIDTH)
    has = comm.rank in (0, comm.size - 1)
    text = rf"stages on ranks 0, {comm.size - 1} use the same layer" if has else None
    with pytest.raises(UsageError if has else PeerError, match=text):
        pipe.step(x, x)
    pipe.eval()
    torch.testing.assert_close(pipe.step(x, x), pipe.evaluate(x, x))  # nothing is changed, so the result is correct
    pipe.close()


def test_a_buffer_changed_by_two_stages_of_a_rank_is_correct(comm: Any) -> None:
    def model() -> list[nn.Module]:
        torch.manual_seed(0)
        shared = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        own = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * comm.size)]
        return [shared, *own, shared]

    whole, layers = nn.Sequential(*model()), model()
    count = len(layers)
    split = [2] + [1] * (2 * comm.size - 2) + [count - 2 * comm.size]
    pipe = pipeline(layers, comm, schedule="zb_v", microbatches=1, loss=F.mse_loss, split=split)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, x), F.mse_loss(whole(x), x).detach(), rtol=1e-12, atol=0)
    state = whole.state_dict()
    for name, value in pipe.gather_state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-10)
    pipe.close()
