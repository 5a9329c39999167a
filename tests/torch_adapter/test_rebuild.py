"""Buckets rebuilt once, in the order in which gradients become ready, identically on all ranks."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib_torch as hvd
from commlib_torch import DataParallel, DistributedOptimizer

from .oracle import assert_close, assert_same_everywhere, gradients_of, parameters_of

TINY = 1e-4
FORWARD = (2, 0, 3, 1)
"""Layers in the order of use: not the order of the module. Backward makes gradients in the reverse."""


class Shuffled(nn.Module):
    """Layers that are used in another order than they are listed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(4, 4).double() for _ in range(4)])

    def forward(self, inputs: Tensor, order: Sequence[int] = FORWARD) -> Tensor:
        for number in order:
            inputs = torch.tanh(self.layers[number](inputs))
        return inputs.square().mean()


@pytest.fixture
def alone() -> None:
    """Free optimizers of earlier tests, which form cycles with their schedulers and would prevent overlap."""
    gc.collect()


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def wrap(network: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    options = {"overlap": True, "bucket_cap_mib": TINY, **options}
    return DistributedOptimizer(optimizer, network.named_parameters(), **options)


def plain(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def layers_of(optimizer: Any) -> list[int]:
    """Return the layers in the order in which gradients are sent; parameters 2 i and 2 i + 1 belong to layer i."""
    sent = [p // 2 for bucket in optimizer.reducer.buckets for p in bucket.parameters if p < 8]
    return list(dict.fromkeys(sent))


def train_alone(comm: Any, steps: int, order: Any = lambda rank, step: FORWARD, ranks: Any = None) -> nn.Module:
    """Train one process on the mean of all ranks' losses; `order` None is a rank without a loss."""
    network = Shuffled()
    optimizer = plain(network)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(comm.size):
            if order(rank, step) is not None:
                (network(inputs_of(rank, step), order(rank, step)) / comm.size).backward()
        optimizer.step()
    return network


def train(comm: Any, optimizer: Any, network: nn.Module, steps: range, order: Any = lambda rank, step: FORWARD) -> None:
    for step in steps:
        optimizer.zero_grad()
        if order(comm.rank, step) is not None:
            network(inputs_of(comm.rank, step), order(comm.rank, step)).backward()
        optimizer.step()


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_the_second_backward_launches_in_the_real_order(comm: Any, wrapper: str) -> None:
    network = Shuffled()
    called: nn.Module = network
    optimizer: Any = plain(network)
    if wrapper == "module":
        called = DataParallel(network, overlap=True, bucket_cap_mib=TINY)
    else:
        optimizer = wrap(network)
    reducer: Any = called if wrapper == "module" else optimizer
    assert layers_of(reducer) == [3, 2, 1, 0]
    early = []
    for step in range(4):
        before = reducer.statistics.early_launches
        optimizer.zero_grad()
        called(inputs_of(comm.rank, step)).backward()
        early.append(reducer.statistics.early_launches - before)
        optimizer.step()
        assert layers_of(reducer) == [1, 3, 0, 2]
    # All but the last one, whose flags are known when backward ends.
    assert early[1:] == [len(reducer.reducer.buckets) - 1] * 3
    assert reducer.statistics.reductions == 4
    assert_close(parameters_of(network), parameters_of(train_alone(comm, 4)))
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_the_order_of_rank_0_counts(comm: Any) -> None:
    """Gradients become ready in different orders on different ranks and in different steps."""
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]

    def order(rank: int, step: int) -> Sequence[int]:
        return orders[(rank + step) % 3]

    network = Shuffled()
    optimizer = wrap(network)
    train(comm, optimizer, network, range(1, 5), order)
    assert layers_of(optimizer) == list(order(0, 1))[::-1]
    alone = Shuffled()
    its = plain(alone)
    for step in range(1, 5):
        its.zero_grad()
        torch.stack([alone(inputs_of(r, step), order(r, step)) for r in range(comm.size)]).mean().backward()
        its.step()
    assert_close(parameters_of(network), parameters_of(alone))
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlapping", ["rank 0", "the others"])
def test_ranks_may_differ_in_overlap(comm: Any, overlapping: str, monkeypatch: Any) -> None:
    """Each rank judges by itself whether overlap pays; rank 0 decides for all whether buckets are rebuilt."""
    pays = (comm.rank == 0) == (overlapping == "rank 0")
    monkeypatch.setattr("commlib.data_parallel.reducer_ranks.overlap_pays", lambda *_, **__: pays)
    network = Shuffled()
    optimizer = wrap(network, overlap=None)
    train(comm, optimizer, network, range(3))
    assert layers_of(optimizer) == ([1, 3, 0, 2] if overlapping == "rank 0" else [3, 2, 1, 0])
    assert (optimizer.statistics.early_launches > 0) == pays
    assert_close(parameters_of(network), parameters_of(train_alone(comm, 3)))


@pytest.mark.ranks(min=2)
def test_without_backward_on_some_ranks(comm: Any) -> None:
    """The first order that rank 0 observes is used, whichever ranks lack a loss; ranks without one take part."""

    def order(rank: int, step: int) -> Sequence[int] | None:
        return None if rank == step or (rank == 1 and step == 1) else FORWARD

    network = Shuffled()
    optimizer = wrap(network)
    train(comm, optimizer, network, range(1), order)
    assert layers_of(optimizer) == [3, 2, 1, 0]
    train(comm, optimizer, network, range(1, 2), order)
    assert layers_of(optimizer) == [1, 3, 0, 2]
    train(comm, optimizer, network, range(2, 4), order)
    assert_close(parameters_of(network), parameters_of(train_alone(comm, 4, order)))
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("batches", ["more on higher ranks", "none but on rank 0", "none on rank 0"])
def test_uneven_numbers_of_batches(comm: Any, batches: str) -> None:
    """Ranks that have joined take part in rebuilding the buckets; the last one has the correct weights.

    Regression: join() named the highest rank if only gradients were reduced, whose weights could be the initial ones.
    """
    counts = {
        "more on higher ranks": list(range(comm.size)),
        "none but on rank 0": [3] + [0] * (comm.size - 1),
        "none on rank 0": [0] + [3] * (comm.size - 1),
    }[batches]

    def order(rank: int, step: int) -> Sequence[int] | None:
        return FORWARD if step < counts[rank] else None

    network = Shuffled()
    optimizer = wrap(network)
    train(comm, optimizer, network, range(counts[comm.rank]))
    last = hvd.join()
    assert counts[last] == max(counts)
    hvd.broadcast_parameters(network.state_dict(), last)
    hvd.broadcast_optimizer_state(optimizer, last)
    assert_close(parameters_of(network), parameters_of(train_alone(comm, max(counts), order)))
    assert comm.all_gather_object(layers_of(optimizer)) == [layers_of(optimizer)] * comm.size
    if counts[0]:
        assert layers_of(optimizer) == [1, 3, 0, 2]
    train(comm, optimizer, network, range(9, 11))  # all ranks continue together
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_rebuilt_without_a_reason(comm: Any, overlap: bool) -> None:
    """The order matches the module, or buckets are launched at the end anyway."""
    network = Shuffled()
    optimizer = wrap(network, overlap=overlap)
    engine = optimizer.reducer.engine
    order = (0, 1, 2, 3) if overlap else FORWARD
    train(comm, optimizer, network, range(3), lambda rank, step: order)
    assert optimizer.reducer.engine is engine
    assert optimizer.reducer.order_is_settled


@pytest.mark.ranks(min=2)
def test_groups_stay_together(comm: Any) -> None:
    network = Shuffled()
    layers = network.layers
    groups = [[*layers[3].parameters(), *layers[2].parameters()], [layers[0].weight]]
    optimizer = wrap(network, groups=groups)
    train(comm, optimizer, network, range(3))
    buckets = [{p for p in b.parameters if p < 8} for b in optimizer.reducer.buckets]
    assert {4, 5, 6, 7} in buckets
    assert {0} in buckets
    assert buckets[0] <= {2, 3}  # layer 1, ready first
    assert buckets[-1] == {4, 5, 6, 7}  # complete with layer 2, the last one
    assert_close(parameters_of(network), parameters_of(train_alone(comm, 3)))


@pytest.mark.parametrize("clear", ["keep", "drop"])
def test_gradients_in_old_buckets_stay_valid(comm: Any, clear: str) -> None:
    """Between the first and the second backward, gradients are views of buckets that are no longer in use."""
    network, alone = Shuffled(), Shuffled()
    optimizer, its = wrap(network), plain(alone)
    for step in range(4):
        network(inputs_of(comm.rank, step)).backward()
        torch.stack([alone(inputs_of(rank, step)) for rank in range(comm.size)]).mean().backward()
        if step != 2:  # a second backward adds to reduced gradients
            assert_close(gradients_of(network), gradients_of(alone))
            for someone in (optimizer, its):
                someone.step()
        if step not in (0, 2):
            for someone in (optimizer, its):
                someone.zero_grad(set_to_none=clear == "drop")
    assert_close(parameters_of(network), parameters_of(alone))


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_accumulation_after_a_rebuild(comm: Any, op: str) -> None:
    """There are two passes per step, and some ranks skip layers in the second one."""
    scale = comm.size if op == "sum" else 1

    def order(rank: int, number: int) -> Sequence[int]:
        return FORWARD if number % 2 == 0 or rank % 2 == 0 else FORWARD[:2]

    network, alone = Shuffled(), Shuffled()
    optimizer, its = wrap(network, backward_passes_per_step=2, op=op), plain(alone)
    for number in range(8):
        network(inputs_of(comm.rank, number), order(comm.rank, number)).backward()
        losses = [alone(inputs_of(rank, number), order(rank, number)) for rank in range(comm.size)]
        (torch.stack(losses).mean() * scale).backward()
        if number % 2:
            assert_close(gradients_of(network), gradients_of(alone))
            for someone in (optimizer, its):
                someone.step()
                someone.zero_grad()
    if comm.size > 1:
        assert layers_of(optimizer) == [1, 3, 0, 2]
    assert_close(parameters_of(network), parameters_of(alone))


@pytest.mark.parametrize("unused", [1, 2])
def test_unused_parameters_after_a_rebuild(comm: Any, unused: int) -> None:
    """Rank 0 used a layer when it chose the order; later only some ranks use it, or none."""

    def order(rank: int, step: int) -> Sequence[int]:
        used = step == 0 or (step == 1 and rank == comm.size - 1)
        return [number for number in FORWARD if used or number != unused]

    network = Shuffled()
    optimizer = wrap(network)
    train(comm, optimizer, network, range(4), order)
    assert_close(parameters_of(network), parameters_of(train_alone(comm, 4, order)))
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_a_parameter_that_rank_0_does_not_use_comes_last(comm: Any) -> None:
    def order(rank: int, step: int) -> Sequence[int]:
        return (2, 0, 3) if rank == 0 and step == 0 else FORWARD

    network = Shuffled()
    optimizer = wrap(network)
    train(comm, optimizer, network, range(3), order)
    assert layers_of(optimizer) == [3, 0, 2, 1]
    assert_close(parameters_of(network), parameters_of(train_alone(comm, 3, order)))


@pytest.mark.ranks(min=2)
def test_with_a_table_whose_gradient_is_sparse(comm: Any) -> None:
    """It leaves the buckets after the first step; the second step determines the order."""

    class Model(nn.Module):
        def __init__(self, *, sparse: bool) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.one, self.table = nn.Linear(3, 3).double(), nn.Embedding(7, 3, sparse=sparse).double()
                self.two = nn.Linear(3, 3).double()

        def forward(self, numbers: Tensor) -> Tensor:
            hidden: Tensor = self.one(torch.tanh(self.two(self.table(numbers))))
            return hidden.square().mean()

    def numbers_of(rank: int, step: int) -> Tensor:
        return torch.tensor([rank, step, 6])

    network, alone = Model(sparse=True), Model(sparse=False)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters(), overlap=True, bucket_cap_mib=TINY
    )
    its = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        for someone in (optimizer, its):
            someone.zero_grad()
        network(numbers_of(comm.rank, step)).backward()
        torch.stack([alone(numbers_of(rank, step)) for rank in range(comm.size)]).mean().backward()
        for someone in (optimizer, its):
            someone.step()
    sent = [p for b in optimizer.reducer.buckets for p in b.parameters if p < 5]
    assert sent == [1, 0, 4, 3, 2]  # one, two, and the table, without elements, at the end
    assert_close(parameters_of(network), parameters_of(alone))
