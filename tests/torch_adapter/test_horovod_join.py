"""Join: when ranks run out of data, the others continue with the results that Horovod promises."""

from typing import Any

import pytest
import torch
from torch import nn

import commlib
import commlib_torch as hvd
from commlib.errors import MismatchError

from .oracle import assert_close, assert_same_everywhere, batch, loss_of, model, parameters_of
from .values import check, of, share


def active(comm: Any, step: int) -> list[int]:
    """The ranks with a batch in this step: rank r has r + 1 batches."""
    return [rank for rank in range(comm.size) if step <= rank]


def test_join_returns_the_last_rank(comm: Any) -> None:
    last = comm.size - 1
    if comm.rank == last:
        for _ in range(3):
            hvd.allreduce(torch.ones(1))
    assert hvd.join() == last if comm.size > 1 else hvd.join() == 0
    assert hvd.allgather_object(comm.rank) == list(range(comm.size))


def test_every_verb_while_some_have_joined(comm: Any) -> None:
    for step in range(comm.rank + 1):
        left = active(comm, step)
        parts = [of(rank) for rank in left]
        own, summed = of(comm.rank), torch.stack(parts).sum(0)
        check(hvd.allreduce(own, op=hvd.Sum), summed)
        torch.testing.assert_close(hvd.allreduce(own, name="average"), summed / comm.size)  # over all ranks
        check(hvd.allreduce(own, op=hvd.Max), torch.stack(parts).amax(0))
        check(hvd.allreduce(own, op=hvd.Product), torch.stack(parts).prod(0))
        check(hvd.grouped_allreduce([own, own.long()], op=hvd.Sum)[1], summed.long())
        check(hvd.allgather(own), torch.cat(parts))
        check(hvd.broadcast(own, comm.size - 1), of(comm.size - 1))
        check(hvd.reducescatter(own, op=hvd.Sum), summed[share(6, comm.size, comm.rank)])
        splits = [1 if rank in left else 0 for rank in range(comm.size)]
        out, received = hvd.alltoall(own, splits)
        assert received.tolist() == splits
        rows = [theirs[left.index(comm.rank)] for theirs in parts]
        check(out, torch.stack(rows))
        assert hvd.allgather_object(comm.rank) == left
        sparse = hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), op=hvd.Sum)()
        check(sparse.to_dense(), torch.eye(3) * len(left))
    assert hvd.join() == comm.size - 1 or comm.size == 1
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(comm.size)))


@pytest.mark.ranks(min=2)
def test_a_broadcast_from_a_rank_that_has_joined(comm: Any) -> None:
    if comm.rank > 0:
        hvd.allreduce(torch.ones(1), name="after all but rank 0 joined")
        with pytest.raises(MismatchError, match="rank 0"):
            hvd.broadcast(torch.ones(2), 0, name="from one that joined")
    hvd.join()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("kind", "overlap"),
    [
        ("plain", True), ("plain", False), ("bf16", True), ("compressor", False), ("sparse", True), ("module", False),
        ("no step", False),
    ],
)  # fmt: skip
def test_training_with_uneven_numbers_of_batches(comm: Any, kind: str, overlap: bool) -> None:
    """Rank r has r + 2 batches. The result matches a process that averages over all ranks, with zeros for some."""

    class Halves:
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return tensor / 2, None

        def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor * 2

    def network() -> nn.Module:
        built = model()
        if kind == "sparse":
            with torch.random.fork_rng():
                torch.manual_seed(1)
                built.insert(0, nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(0, 1)).double())
        return built

    def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch(comm, step)
        own = slice(4 * rank, 4 * rank + 4)
        if kind == "sparse":
            numbers = (torch.arange(4).reshape(4, 1) * (step + 1) + rank) % 9
            return numbers, targets[own]
        return inputs[own], targets[own]

    steps, mine_steps = comm.size + 1, comm.rank + 2
    trained, alone = network(), network()
    options: dict[str, Any] = {"bf16": {"compression": hvd.Compression.bf16}, "compressor": {"compression": Halves()}}
    own: Any = torch.optim.SGD(trained.parameters(), lr=0.1)
    called: nn.Module = trained
    if kind == "module":
        called = hvd.DataParallel(trained, overlap=overlap, bucket_cap_mib=1e-4)
    else:
        own = hvd.DistributedOptimizer(
            own, trained.named_parameters(), **options.get(kind, {}), overlap=overlap, bucket_cap_mib=1e-4
        )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        losses = [loss_of(alone, rows(step, rank)) for rank in range(comm.size) if step < rank + 2]
        plain.zero_grad()
        if not (kind == "no step" and step % 2):
            (torch.stack(losses).sum() / comm.size).backward()
        plain.step()
        if step == mine_steps - 1:
            mid = parameters_of(alone)
    for step in range(mine_steps):
        own.zero_grad()
        if not (kind == "no step" and step % 2):
            loss_of(called, rows(step, comm.rank)).backward()
        own.step()
    gradients = [None if p.grad is None else p.grad.clone() for p in trained.parameters()]
    assert hvd.join() == comm.size - 1
    tolerance = 2e-3 if kind == "bf16" else 1e-10
    assert_close(parameters_of(trained), mid, tolerance)  # the weights of a rank that has joined do not change
    for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad.to_dense(), gradient.to_dense())  # type: ignore[union-attr]
    hvd.broadcast_parameters(trained.state_dict(), comm.size - 1)
    assert_close(parameters_of(trained), parameters_of(alone), tolerance)
    # All ranks continue together.
    own.zero_grad()
    loss_of(called, rows(9, comm.rank)).backward()
    own.step()
    assert_same_everywhere(comm, parameters_of(trained))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_two_optimizers(comm: Any, separate: bool, overlap: bool) -> None:
    """Regression: a rank that had joined could not know which optimizer reduces next, and was refused."""
    group = commlib.world().split(0) if separate else None

    def make(wrapped: bool) -> Any:
        one, two = model(), nn.Linear(3, 3).double()
        with torch.no_grad():
            two.weight.copy_(torch.eye(3))
            two.bias.fill_(0.5)
        created: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (one, two)]
        if wrapped:
            created[0] = hvd.DistributedOptimizer(created[0], overlap=overlap, bucket_cap_mib=1e-4)
            created[1] = hvd.DistributedOptimizer(created[1], overlap=overlap, ranks=group)
        return one, two, *created

    def step(parts: Any, losses: Any) -> None:
        one, two, first, second = parts
        for evaluate in (lambda data: loss_of(one, data), lambda data: loss_of(lambda x: two(one(x)), data)):
            first.zero_grad()
            second.zero_grad()
            losses(evaluate).backward()
            first.step()
            if losses.through_both:
                second.step()
            losses.through_both = not losses.through_both

    class Losses:
        def __init__(self, ranks: Any, number: int, scale: float = 1.0) -> None:
            self.ranks, self.number, self.scale, self.through_both = ranks, number, scale, False

        def __call__(self, evaluate: Any) -> Any:
            inputs, targets = batch(comm, self.number)
            rows = [slice(4 * rank, 4 * rank + 4) for rank in self.ranks]
            return torch.stack([evaluate((inputs[each], targets[each])) for each in rows]).sum() * self.scale

    own, alone = make(True), make(False)
    for number in range(comm.size):
        if number <= comm.rank:
            step(own, Losses([comm.rank], number))
        step(alone, Losses(active(comm, number), number, 1 / comm.size))
    assert hvd.join() == comm.size - 1
    for network in own[:2]:
        hvd.broadcast_parameters(network.state_dict(), comm.size - 1)
    for network, other in zip(own[:2], alone[:2], strict=True):
        assert_close(parameters_of(network), parameters_of(other), 1e-11)
    step(own, Losses([comm.rank], 9))  # all ranks continue together
