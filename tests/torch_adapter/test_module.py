"""DataParallel as a module: names, checkpoints, attributes, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch import DataParallel

from .oracle import assert_close, assert_same_everywhere


class Net(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("count", torch.tensor(7 + int(value)))
        self.hint = "hello"
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.add_(value)

    def forward(self, inputs: Tensor, *, twice: bool = False) -> Tensor:
        outputs: Tensor = self.norm(self.linear(inputs))
        return 2 * outputs if twice else outputs


KEYS = list(Net().state_dict())


def test_parameters_and_buffers_come_from_rank_0(comm: Any) -> None:
    net = Net(comm.rank)
    net.norm.running_mean.fill_(comm.rank)  # type: ignore[union-attr]
    DataParallel(net)
    assert_same_everywhere(comm, [tensor.reshape(-1) for tensor in net.state_dict().values()])
    assert net.count == 7
    assert net.norm.running_mean.sum() == 0  # type: ignore[union-attr]


def test_calls_and_attributes_reach_the_module(comm: Any) -> None:
    net = Net()
    wrapped = DataParallel(net).eval()
    inputs = torch.ones(2, 3)
    assert torch.equal(wrapped(inputs, twice=True), 2 * net(inputs))
    assert wrapped.hint == "hello"
    assert wrapped.linear is net.linear
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    assert not net.training


def test_names_match_the_module(comm: Any) -> None:
    net = Net()
    wrapped = DataParallel(net)
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in net.named_buffers()]
    assert list(wrapped.state_dict()) == KEYS


def test_checkpoints_are_interchangeable(comm: Any) -> None:
    source, wrapped, plain = DataParallel(Net(3)), DataParallel(Net(5)), Net(9)
    wrapped.load_state_dict(source.state_dict())
    plain.load_state_dict(source.state_dict())
    for net in (wrapped, plain):
        assert_close(list(net.state_dict().values()), list(source.state_dict().values()), 0)
    wrapped.load_state_dict(Net(1).state_dict())
    assert wrapped.count == 8
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**plain.state_dict(), "more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({})


def test_within_another_module(comm: Any) -> None:
    outer, plain = nn.ModuleDict({"a": DataParallel(Net(1))}), nn.ModuleDict({"a": Net(2)})
    assert list(outer.state_dict()) == [f"a.{key}" for key in KEYS]
    plain.load_state_dict(outer.state_dict())
    outer.load_state_dict(nn.ModuleDict({"a": Net(4)}).state_dict())
    assert outer["a"].count == 11
    assert plain["a"].count == 8


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_computes_but_reduces_nothing(comm: Any, duplicate: Any) -> None:
    wrapped = DataParallel(Net()).eval()
    clone = duplicate(wrapped)
    inputs = torch.full((2, 3), comm.rank + 1.0)
    assert torch.equal(clone(inputs), wrapped(inputs))
    clone(inputs).sum().backward()
    local: Any = copy.deepcopy(wrapped.module)
    local.zero_grad()
    local(inputs).sum().backward()
    assert_close(clone.linear.weight.grad, local.linear.weight.grad, 0)
    assert list(clone.state_dict()) == KEYS
    with clone.no_sync():
        clone.synchronize()
    assert clone.exposed_seconds == 0
    assert wrapped.statistics.reductions == 0


def test_train_and_frozen_only(comm: Any) -> None:
    """A module without anything to train may be wrapped."""
    wrapped = DataParallel(nn.Linear(2, 2).requires_grad_(False))
    assert wrapped(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.ranks(min=2)
def test_line_search_optimizers_are_refused(comm: Any) -> None:
    """Regression: LBFGS silently followed each rank's own loss, so that weights diverged."""
    net = nn.Linear(3, 1)
    wrapped, other = DataParallel(net), nn.Linear(3, 1)
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(comm.rank))

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = module(inputs).square().mean()
            loss.backward()
            return float(loss)

        optimizer.step(closure)

    with pytest.raises(UsageError, match=r"LBFGS chooses the length of its step.*DistributedOptimizer"):
        step(wrapped, torch.optim.LBFGS(wrapped.parameters(), line_search_fn="strong_wolfe"))
    step(other, torch.optim.LBFGS(other.parameters()))  # of another model
    step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    assert_same_everywhere(comm, [tensor.detach().reshape(-1) for tensor in net.parameters()])
