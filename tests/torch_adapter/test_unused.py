"""Unused parameters: without a gradient on some ranks, on all, or in some steps; shared, frozen and unfrozen ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch import DataParallel, DistributedOptimizer

from .oracle import assert_close, assert_same_everywhere, gradients_of, parameters_of

TINY = 1e-4


class Branches(nn.Module):
    """A trunk and three heads, some of which each input uses."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk = nn.Linear(4, 4).double()
            self.heads = nn.ModuleList([nn.Linear(4, 2).double() for _ in range(3)])

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        hidden = self.trunk(inputs)
        losses = [hidden.square().mean(), *(self.heads[number](hidden).square().mean() for number in used)]
        return torch.stack(losses).sum()


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def alone(size: int, steps: int, uses: Callable[[int, int], list[int]], make: Any) -> tuple[nn.Module, list[Any]]:
    """Compute the mean of all ranks' losses in one process."""
    network = Branches()
    optimizer = make(network.parameters())
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = [network(inputs_of(rank, step), uses(rank, step)) for rank in range(size)]
        (sum(losses) / size).backward()
        history.append(gradients_of(network))
        optimizer.step()
    return network, history


USES: dict[str, Callable[[int, int], list[int]]] = {
    "one head on no rank": lambda rank, step: [0, 1],
    "one head each": lambda rank, step: [rank % 3],
    "other heads each step": lambda rank, step: [(rank + step) % 3],
    "a head on rank 0 only": lambda rank, step: [0, 1] if rank == 0 else [0],
    "a head in step 0 only": lambda rank, step: [0, 1] if step == 0 else [0],
    "heads only on rank 0, and only later": lambda rank, step: [0, 1, 2] if rank == 0 and step == 2 else [],
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
@pytest.mark.parametrize("case", USES)
def test_unused_parameters(comm: Any, case: str, wrapper: str, overlap: bool) -> None:
    """Gradients are None exactly as in one process: momentum and weight decay reveal a difference."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    expected, history = alone(comm.size, 4, USES[case], make)
    network = Branches()
    module: nn.Module = network
    optimizer: Any = make(network.parameters())
    if wrapper == "optimizer":
        optimizer = DistributedOptimizer(optimizer, bucket_cap_mib=TINY, overlap=overlap)
    else:
        module = DataParallel(network, bucket_cap_mib=TINY, overlap=overlap)
    for step in range(4):
        optimizer.zero_grad()
        module(inputs_of(comm.rank, step), USES[case](comm.rank, step)).backward()
        assert_close(gradients_of(network), history[step])
        optimizer.step()
    assert_close(parameters_of(network), parameters_of(expected))
    assert_same_everywhere(comm, parameters_of(network))


def test_a_rank_without_a_loss_joins_in_step(comm: Any) -> None:
    """In step s rank s has no loss and runs no backward; its step() takes part, or the others would hang."""

    def run(optimizer: torch.optim.Optimizer, network: nn.Module, ranks: list[int], size: int) -> None:
        for step in range(4):
            optimizer.zero_grad()
            losses = [network(inputs_of(rank, step), [0]) for rank in ranks if rank != step]
            if losses:
                (sum(losses) / size).backward()
            optimizer.step()

    network, reference = Branches(), Branches()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network.parameters()))
    run(optimizer, network, [comm.rank], 1)
    run(torch.optim.Adam(reference.parameters()), reference, list(range(comm.size)), comm.size)
    assert_close(parameters_of(network), parameters_of(reference), 1e-10)
    if comm.size > 1:
        assert optimizer.statistics.reductions == 4


@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_a_rank_without_a_loss_can_join_before_clipping(comm: Any, wrapper: str) -> None:
    network = Branches()
    joins: Any
    if wrapper == "optimizer":
        joins = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    else:
        joins = DataParallel(network)
    for _ in range(2):
        if comm.rank == comm.size - 1 and comm.size > 1:
            joins.synchronize()
        else:
            network(torch.ones(2, 4, dtype=torch.float64), [1]).backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        assert norm > 0
        assert comm.all_gather_object(norm.item()) == [norm.item()] * comm.size
        if wrapper == "optimizer":
            joins.step()
        network.zero_grad()
    if wrapper == "optimizer" and comm.size > 1:
        assert joins.statistics.reductions == 2


def test_step_without_any_gradient_anywhere(comm: Any) -> None:
    network = Branches()
    before = parameters_of(network)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=1.0))
    optimizer.step()
    assert gradients_of(network) == [None] * 8
    assert_close(parameters_of(network), before, 0)


def test_shared_parameters(comm: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.encode = nn.Linear(4, 4, bias=False).double()
                self.decode = nn.Linear(4, 4).double()
            self.decode.weight = self.encode.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.decode(torch.tanh(self.encode(self.encode(inputs)))).square().mean()  # type: ignore[no-any-return]

    network, reference = Tied(), Tied()
    named = network.named_parameters(remove_duplicate=False)  # the same tensor under two names
    optimizer: Any = DistributedOptimizer(
        torch.optim.Adam(network.parameters()), named, bucket_cap_mib=TINY, overlap=True
    )
    plain = torch.optim.Adam(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        network(inputs_of(comm.rank, step)).backward()
        optimizer.step()
        plain.zero_grad()
        torch.stack([reference(inputs_of(rank, step)) for rank in range(comm.size)]).mean().backward()
        plain.step()
    assert_close(parameters_of(network), parameters_of(reference), 1e-10)


def test_frozen_parameters_are_left_alone(comm: Any) -> None:
    network, reference = Branches(), Branches()
    for someone in (network, reference):
        someone.heads[0].requires_grad_(False)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        if step == 1:  # frozen later: its gradient stays None, and no rank waits for it
            for someone in (network, reference):
                someone.heads[1].requires_grad_(False)
        optimizer.zero_grad()
        network(inputs_of(comm.rank, step), [0, 1]).backward()
        optimizer.step()
        plain.zero_grad()
        torch.stack([reference(inputs_of(rank, step), [0, 1]) for rank in range(comm.size)]).mean().backward()
        assert_close(gradients_of(network), gradients_of(reference))
        plain.step()
    assert_close(parameters_of(network), parameters_of(reference))


def test_unfrozen_later(comm: Any) -> None:
    network = Branches()
    network.heads[0].requires_grad_(False)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    network.heads[0].requires_grad_(True)
    network(inputs_of(comm.rank, 0), [0]).backward()
    with pytest.raises(UsageError, match="not reduced"):
        optimizer.step()
