"""Embeddings with sparse gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib_torch as hvd
from commlib.errors import MismatchError

from .oracle import assert_close, assert_same_everywhere, parameters_of

ROWS, TINY = 11, 1e-4


class Bag(nn.Module):
    """Two tables, the second of which is not always used, and dense layers."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Embedding(ROWS, 4, sparse=sparse).double()
            self.head = nn.Linear(4, 2).double()
            self.second = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=sparse).double()

    def forward(self, numbers: Tensor, second: bool) -> Tensor:
        hidden = self.first(numbers).sum(1)
        if second:
            hidden = hidden + self.second(numbers)
        return self.head(torch.tanh(hidden)).square().mean()  # type: ignore[no-any-return]


def numbers_of(rank: int, step: int) -> Tensor:
    return torch.randint(ROWS, (3, 2), generator=torch.Generator().manual_seed(10 * step + rank))


def use_second(rank: int, step: int) -> bool:
    """No rank uses it at first, then rank 0 only, then all ranks."""
    return step > 2 or (step > 0 and rank == 0)


class Copies:
    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
        return tensor


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "sparse": ({}, 1e-11),
    "sum": ({"op": hvd.Sum}, 1e-11),
    "as dense": ({"sparse_as_dense": True}, 1e-11),
    "as dense, own compressor": ({"sparse_as_dense": True, "compression": Copies()}, 1e-11),
    "as dense, two passes": ({"sparse_as_dense": True, "backward_passes_per_step": 2}, 1e-11),
    "bf16": ({"compression": hvd.Compression.bf16}, 2e-2),
    "own compressor": ({"compression": Copies()}, 1e-11),
    "predivide": ({"gradient_predivide_factor": 2.0}, 1e-11),
    "two passes": ({"backward_passes_per_step": 2}, 1e-11),
    "grouped": ({"groups": 1}, 1e-11),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", OPTIONS)
def test_training(comm: Any, kind: str, overlap: bool) -> None:
    options, tolerance = OPTIONS[kind]
    scale = 1 if kind == "sum" else 1 / comm.size
    network, alone = Bag(sparse=True), Bag(sparse=False)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        network.named_parameters(),
        **options,
        bucket_cap_mib=TINY,
        overlap=overlap,
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(6):
        network(numbers_of(comm.rank, step), use_second(comm.rank, step)).backward()
        losses = [alone(numbers_of(rank, step), use_second(rank, step)) for rank in range(comm.size)]
        (torch.stack(losses).sum() * scale).backward()
        if kind.endswith("two passes") and step % 2 == 0:
            continue
        for (name, got), expected in zip(network.named_parameters(), alone.parameters(), strict=True):
            if expected.grad is None:
                assert got.grad is None, name
                continue
            assert got.grad is not None, name
            if comm.size > 1:
                assert got.grad.is_sparse == (name != "head.weight" and name != "head.bias")
            assert_close(got.grad.to_dense(), expected.grad, tolerance)
        for its in (optimizer, plain):
            its.step()
            its.zero_grad()
    assert_close(parameters_of(network), parameters_of(alone), tolerance)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.parametrize("options", [{}, {"compression": Copies()}, {"compression": hvd.Compression.bf16}])
@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_adam_accepts_gradients_reduced_as_dense(comm: Any, as_dense: bool, options: dict[str, Any]) -> None:
    """Regression: it takes sparse gradients only, but received dense ones. Not all ranks always use all tables."""
    network, alone = Bag(sparse=True), Bag(sparse=True)

    def optimizers(mod: Bag) -> Any:
        tables = [mod.first.weight, mod.second.weight]
        return torch.optim.SparseAdam(tables, lr=0.1)

    head: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.head.parameters(), lr=0.1))
    tables: Any = hvd.DistributedOptimizer(
        optimizers(network), sparse_as_dense=as_dense, overlap=False, bucket_cap_mib=TINY, **options
    )
    plain = torch.optim.SGD(alone.head.parameters(), lr=0.1), optimizers(alone)
    for step in range(5):
        network(numbers_of(comm.rank, step), use_second(comm.rank, step)).backward()
        losses = [alone(numbers_of(rank, step), use_second(rank, step)) for rank in range(comm.size)]
        (torch.stack(losses).sum() / comm.size).backward()
        for its in (head, tables, *plain):
            its.step()
            its.zero_grad()
    assert_close(parameters_of(network), parameters_of(alone), 2e-2 if "BF16" in str(options) else 1e-11)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_the_table_leaves_its_bucket(comm: Any) -> None:
    """Once ranks know that a gradient is sparse, they send no zeros for it."""
    network = nn.Embedding(100_000, 8, sparse=True)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    sent = []
    for _ in range(3):
        before = optimizer.statistics.nbytes
        network(torch.tensor([comm.rank])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.statistics.nbytes - before)
    assert sent[0] > 3_000_000 > 1000 > sent[1] == sent[2]


@pytest.mark.ranks(min=2)
def test_a_gradient_sparse_on_some_ranks_only_is_refused(comm: Any) -> None:
    network = nn.Embedding(5, 2, sparse=comm.rank == 0)
    hvd.DistributedOptimizer(optimizer := torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters())
    with pytest.raises(MismatchError, match="weight is sparse on some ranks and dense on others"):
        network(torch.tensor([1])).sum().backward()
    assert optimizer.param_groups


def test_sparse_adam(comm: Any) -> None:
    """An optimizer that accepts only sparse gradients."""
    network, alone = nn.Embedding(7, 2, sparse=True), nn.Embedding(7, 2, sparse=True)
    alone.load_state_dict({"weight": hvd.broadcast(network.weight.detach(), 0)})
    network.load_state_dict(alone.state_dict())
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SparseAdam(network.parameters(), lr=0.1))
    plain = torch.optim.SparseAdam(alone.parameters(), lr=0.1)
    for step in range(3):
        for its in (optimizer, plain):
            its.zero_grad()
        network(torch.tensor([comm.rank, step])).square().sum().backward()
        everyones = torch.tensor([number for rank in range(comm.size) for number in (rank, step)])
        (alone(everyones).square().sum() / comm.size).backward()
        for its in (optimizer, plain):
            its.step()
    assert_close(parameters_of(network), parameters_of(alone), 1e-5)
