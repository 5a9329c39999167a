"""Rebalancing moves all state of experts between ranks: optimizer state and copies of the model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch import Checkpoint, DistributedOptimizer, elastic, gather_state_dict
from commlib_torch.expert import MoE, auxiliary_loss, rebalance_experts
from tests.torch_adapter.expert_oracle import near, single

pytestmark = pytest.mark.ranks(min=2)
WIDTH = 6


class Blocks(nn.Module):
    """Two blocks; the second is a copy of the first."""

    def __init__(self, ranks: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = MoE(WIDTH, Experts(8, top_k=1, hidden=4), ranks)
        self.blocks = nn.ModuleList([first, copy.deepcopy(first)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def rows(comm: Any, seed: int) -> Tensor:
    return torch.randn(2 * comm.size, 3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def other_ranks(comm: Any) -> Any:
    group = comm.split(0, name="other ranks")
    assert group is not None
    return group


def mine(comm: Any, x: Tensor) -> Tensor:
    own: Tensor = x.chunk(comm.size)[comm.rank]
    return own


def trained(model: Any, optimizer: Any, x: Tensor) -> None:
    (model(x).square().mean() + auxiliary_loss(model)).backward()
    optimizer.step()
    optimizer.zero_grad()


def result(model: Any, x: Tensor) -> Tensor:
    model.eval()
    output: Tensor = model(x).detach()
    model.train()
    return output


def busy(model: Any, which: int) -> None:
    """Make neighbouring experts the most popular, different ones in each block."""
    for number, block in enumerate(model.blocks):
        block.stats()
        load = block.mixture.counted.numbers
        load[:] = [*range(1, 9), 300, 0, 0]
        place = 2 * ((which + number) % 4)
        load[place : place + 2] = 100


def owners(model: Any) -> list[Any]:
    return [block.mixture.placement.owners for block in model.blocks]


def adam(parameters: Any, rate: float = 0.01) -> Any:
    return torch.optim.Adam(parameters, rate)


@pytest.mark.parametrize("gives_optimizer", [True, False])
def test_averages_and_copies_are_moved(comm: Communicator, gives_optimizer: bool) -> None:
    """Regression: averages belonged to different experts after the move, and so did moments without the optimizer."""
    if comm.size == 3:
        pytest.skip("8 experts")
    results: list[list[dict[str, Tensor]]] = []
    for ranks, moves in ((single(comm), False), (comm, True)):
        own: Any = Blocks(ranks).double()
        other = copy.deepcopy(own)  # trained independently
        optimizer, second = adam(own.parameters()), adam(other.parameters(), 0.02)
        if moves:
            optimizer, second = (
                DistributedOptimizer(one, model.named_parameters(), ranks=comm)
                for one, model in ((optimizer, own), (second, other))
            )
        average = AveragedModel(own, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        plain: Any = copy.deepcopy(copy.copy(average.module))  # the objects in between no longer exist
        loaded: Any = Blocks(ranks if gives_optimizer or not moves else other_ranks(comm)).double()
        loaded.load_state_dict(own.state_dict())
        given: Any = Blocks(ranks).double()
        given.load_state_dict(gather_state_dict(own))  # values only
        for step in range(6):
            x = rows(comm, step)
            for model, by in ((own, optimizer), (other, second)):
                trained(model, by, mine(comm, x) if moves else x)
            if moves and step in (1, 3, 4):
                busy(model := own if step < 4 else average.module, step)
                rebalance_experts(model, optimizer if gives_optimizer else None, copies=[given])
                assert owners(own)[0] != owners(own)[1]
                assert owners(own) == owners(other) == owners(average.module) == owners(plain)
                assert owners(own) == owners(loaded) == owners(given)
            average.update_parameters(own)
            loaded.blocks[1].load_state_dict(own.blocks[1].state_dict())
            with torch.no_grad():
                for old, new in zip(loaded.blocks[0].parameters(), own.blocks[0].parameters(), strict=True):
                    old.lerp_(new, 0.5)
                for old, new in zip(given.parameters(), own.parameters(), strict=True):
                    old.lerp_(new, 0.5)
                for old, new in zip(plain.parameters(), own.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
        results.append([gather_state_dict(model) for model in (own, other, average.module, plain, loaded, given)])
        x = rows(comm, 9)
        results[-1].append({"outputs": average.module.eval()(mine(comm, x) if moves else x).detach()})
    results[0][-1] = {"outputs": mine(comm, results[0][-1]["outputs"])}
    for what, expected, got in zip(
        ("model", "other", "average", "plain", "loaded", "given", "outputs"), *results, strict=True
    ):
        for name, value in expected.items():
            near(got[name], value, f"{what}: {name}")


def test_unmovable_state_is_refused(comm: Communicator) -> None:
    """State without elements, and copies on one rank only, are refused before anything moves."""
    if comm.size == 3:
        pytest.skip("8 experts")
    model: Any = Blocks(comm).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trained(model, optimizer, mine(comm, rows(comm, 0)))
    before, weights = owners(model), [one.detach().clone() for one in model.parameters()]
    expert = next(model.blocks[0].experts.parameters())
    optimizer.state[expert]["rows"] = torch.zeros(len(expert))
    busy(model, 0)
    with pytest.raises(UsageError, match=r"the SGD state rows of MoE.experts.up.weight is not a tensor of shape"):
        rebalance_experts(model)
    del optimizer.state[expert]["rows"]
    if comm.rank == 0:
        del optimizer.state[expert]["momentum_buffer"]
    busy(model, 0)
    with pytest.raises(MismatchError, match=r"rebalance_experts: MoE.*momentum_buffer of SGD"):
        rebalance_experts(model)
    if comm.rank == 0:
        average = copy.deepcopy(model)
    busy(model, 0)
    with pytest.raises(MismatchError, match=r"copies of the layer, such as averages of weights: "):
        rebalance_experts(model)
    if comm.rank == 0:
        average.itself = average  # is missed later
        del average, optimizer.state[expert]
    else:
        del optimizer.state[expert]
    for wrong in (model.blocks[0], model, Blocks(single(comm)).double(), nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=r"one of copies=, has no mixture like MoE whose experts are on the same"):
            rebalance_experts(model, copies=[wrong])
    assert owners(model) == before
    assert all(map(torch.equal, model.parameters(), weights))
    busy(model, 0)
    rebalance_experts(model, optimizer)
    assert owners(model) != before


@pytest.mark.parametrize("kept", ["checkpoint", "elastic"])
def test_restored_models_know_the_places_of_experts(comm: Communicator, kept: str, tmp_path: Path) -> None:
    """Regression: a restored model had weights that did not match its router; elastic state was refused."""
    if comm.size == 3:
        pytest.skip("8 experts")
    model: Any = Blocks(comm).double()
    optimizer = adam(model.parameters())
    x = mine(comm, rows(comm, 0))
    if kept == "elastic":
        state = elastic.TorchState(model, optimizer)
        before = result(model, x)
        trained(model, optimizer, x)
        busy(model, 1)
        rebalance_experts(model, optimizer)
        state.restore()
        assert torch.equal(result(model, x), before)
        return
    trained(model, optimizer, x)
    busy(model, 1)
    rebalance_experts(model, optimizer)
    folder = comm.broadcast_object(str(tmp_path))
    Checkpoint(folder, model=model, optimizer=optimizer, ranks=comm).save(1)
    results = []
    for again in (model, Blocks(comm).double()):
        if again is model:
            busy(model, 2)
            expected, states = result(model, x), gather_state_dict(model)
            rebalance_experts(model, optimizer)
        by = optimizer if again is model else adam(again.parameters())
        assert Checkpoint(folder, model=again, optimizer=by, ranks=comm).resume() == 1
        assert torch.equal(result(again, x), expected)
        assert all(torch.equal(value, states[name]) for name, value in gather_state_dict(again).items())
        trained(again, by, x)
        results.append(gather_state_dict(again))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_stale_copies_and_clones_of_state_are_noticed(comm: Communicator) -> None:
    """Copies from before the move are refused, and clones warned of. Wrong experts once loaded clones silently."""
    if comm.size == 3:
        pytest.skip("8 experts")
    model: Any = Blocks(comm).double()
    x = mine(comm, rows(comm, 0))
    whole, copied = gather_state_dict(model), copy.deepcopy(model.state_dict())
    clones = {name: value.clone() for name, value in model.state_dict().items()}
    before = result(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(clones)
        model.load_state_dict(copied)
        busy(model, 1)
        rebalance_experts(model)
        model.load_state_dict(whole)
        model.load_state_dict(model.state_dict())
    assert torch.equal(result(model, x), before)
    with pytest.raises(UsageError, match="experts"):
        model.load_state_dict(copied)
    with pytest.warns(UserWarning, match=r"blocks.1.experts.* does not identify its experts"):
        model.load_state_dict(clones)


def test_gradients_are_moved(comm: Communicator) -> None:
    """Regression: accumulated gradients were dropped. A rank may have none if no token chose its experts."""
    if comm.size == 3:
        pytest.skip("8 experts")
    results = []
    for moves in (False, True):
        model: Any = Blocks(comm).double()
        optimizer = DistributedOptimizer(adam(model.parameters()), model.named_parameters(), ranks=comm)
        with optimizer.no_sync():
            (model(mine(comm, rows(comm, 0))).square().mean() + auxiliary_loss(model)).backward()
        if moves:
            busy(model, 0)
            before = owners(model)
            rebalance_experts(model, optimizer)
            assert owners(model) != before
        trained(model, optimizer, mine(comm, rows(comm, 1)))
        results.append(gather_state_dict(model))
    for name, value in results[0].items():
        near(results[1][name], value, name, 1e-10)


def test_a_rank_without_gradients_receives_those_of_experts(comm: Communicator) -> None:
    if comm.size == 3:
        pytest.skip("8 experts")
    model: Any = Blocks(comm).double()
    busy(model, 0)
    for block in model.blocks:
        if comm.rank == 0:
            for weight in block.experts.parameters():
                weight.grad = torch.ones_like(weight)
    rebalance_experts(model)
    for block in model.blocks:
        for weight in block.experts.parameters():
            sums = comm.all_reduce(weight.grad.flatten(1).sum(1).sum().reshape(1).numpy(), "sum")
            assert sums[0] == weight.numel()  # as many as rank 0 had


@pytest.mark.parametrize("saved", ["before", "after"])
def test_a_rank_s_own_optimizer_state_identifies_its_experts(comm: Communicator, saved: str) -> None:
    """Regression: moments of other experts were silently accepted."""
    if comm.size == 3:
        pytest.skip("8 experts")
    model: Any = Blocks(comm).double()
    optimizer = adam(model.parameters())

    def step(number: int) -> None:
        trained(model, optimizer, mine(comm, rows(comm, number)))

    for number in range(3):
        step(number)
    own = copy.deepcopy(optimizer.state_dict())
    busy(model, 0)
    rebalance_experts(model, optimizer)
    if saved == "after":
        step(3)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(4)
        own = copy.deepcopy(optimizer.state_dict())
        model = Blocks(comm).double()
        optimizer = adam(model.parameters())
    optimizer.load_state_dict(own)
    with pytest.raises(UsageError, match=r"exp_avg that Adam keeps on rank \d.*the state has the shard of rank"):
        step(5)
