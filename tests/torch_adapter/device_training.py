"""Bodies of tests: models trained on a device over all ranks match one process on the host. See `place`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import commlib_torch as ct
from tests.torch_adapter.place import Place

TINY = 64 / 2**20  # MiB: a bucket for each parameter or two
ROWS, FEATURES, STEPS = 4, 6, 4


class Sum(nn.Module):
    """Parallel linear layers whose sums of whole numbers are exact. Some ranks use one of them; none use another.

    A few steps are exact in float64, too, because no two weights are ever multiplied.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, 3, dtype=dtype) for _ in range(3))
        self.seldom, self.never = nn.Linear(FEATURES, 3, dtype=dtype), nn.Linear(2, 2, dtype=dtype)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_((torch.arange(parameter.numel()) + number).view(parameter.shape) % 5 - 2)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        y: Tensor = sum((layer(x) for layer in self.layers), torch.zeros((), dtype=x.dtype, device=x.device))
        return y + self.seldom(x) if seldom else y


def batch(comm: Any, step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks: whole numbers."""
    rows = ROWS * comm.size
    inputs = torch.arange(rows * FEATURES).view(rows, FEATURES) * (step + 3) % 7 - 3
    return inputs.double(), (torch.arange(rows * 3).view(rows, 3) % 4 - step).double()


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def part(comm: Any, tensors: tuple[Tensor, Tensor], rank: int | None = None) -> tuple[Tensor, ...]:
    rank = comm.rank if rank is None else rank
    return tuple(tensor[rank * ROWS : (rank + 1) * ROWS] for tensor in tensors)


def is_seldom(comm: Any, rank: int) -> bool:
    return rank == int(comm.size) - 1


def whole_loss(comm: Any, model: Any, step: int) -> Tensor:
    parts = [(part(comm, batch(comm, step), rank), is_seldom(comm, rank)) for rank in range(comm.size)]
    losses = [loss_of(model(x, seldom), y) for (x, y), seldom in parts]
    return torch.stack(losses).sum()


def train_alone(comm: Any, passes: int = 1) -> nn.Module:
    """Train on the whole batch in plain PyTorch."""
    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-7, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            whole_loss(comm, model, step + 10 * number).backward()
        optimizer.step()
    return model


def own_loss(comm: Any, model: Any, place: Place, step: int) -> Tensor:
    x, y = part(comm, batch(comm, step))
    return loss_of(model(place.put(x), is_seldom(comm, comm.rank)), place.put(y))


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), theirs.detach()), name


def wrapped(comm: Any, model: nn.Module, how: str, **options: Any) -> tuple[Any, Any]:
    """Return the module to call and the optimizer."""
    sgd: Any = torch.optim.SGD(model.parameters(), lr=2**-7, momentum=0.5)
    settings = {"first_bucket_mib": TINY, "bucket_cap_mib": TINY, "op": "sum", "ranks": comm, **options}
    if how == "DataParallel":
        return ct.DataParallel(model, **settings), sgd
    return model, ct.DistributedOptimizer(sgd, model.named_parameters(), **settings)


def trains_exactly(comm: Any, place: Place, how: str, *, overlap: bool, set_to_none: bool = True) -> None:
    """Weights match one process to the last bit; after backward, gradients are final and are views of buckets."""
    with place.host():
        expected = train_alone(comm)
    model = Sum().to(place.device)
    called, optimizer = wrapped(comm, model, how, overlap=overlap)
    addresses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        own_loss(comm, called, place, step).backward()
        reducer = (called if how == "DataParallel" else optimizer).reducer
        assert model.never.weight.grad is None
        if comm.size > 1:
            buckets = {bucket.device for bucket in reducer.buckets}
            assert buckets == {place.name}
            slots = {reducer.engine.slot(number).address for number in range(len(reducer.gradients))}
            results = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
            assert len(results) == 8
            assert step == 0 or set(results) <= slots  # buckets are rebuilt in the order observed in the first step
            addresses.append(results)
        optimizer.step()
    assert_same(model, expected)
    if comm.size > 1:
        assert addresses[2] == addresses[3]
        assert (reducer.statistics.early_launches > 0) == overlap


def accumulates(comm: Any, place: Place) -> None:
    """Two backward passes make a step; the first one reduces nothing."""
    with place.host():
        expected = train_alone(comm, passes=2)
    model = Sum().to(place.device)
    called, optimizer = wrapped(comm, model, "DistributedOptimizer", backward_passes_per_step=2, overlap=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            own_loss(comm, called, place, step + 10 * number).backward()
        optimizer.step()
    assert_same(model, expected)


def keeps_gradients(comm: Any, place: Place) -> None:
    """A gradient that user code keeps over a step does not change: the bucket moves, and moves back."""
    model = Sum().to(place.device)
    called, optimizer = wrapped(comm, model, "DistributedOptimizer", overlap=True)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        own_loss(comm, called, place, step).backward()
        gradient = model.seldom.weight.grad
        assert gradient is not None
        if step < 2:
            kept.append((gradient, gradient.detach().cpu().clone()))
        optimizer.step()
    for gradient, values in kept:
        assert torch.equal(gradient.cpu(), values)
    with place.host():
        assert_same(model, train_alone(comm))


def host_and_device(comm: Any, place: Place) -> None:
    """A model has parameters on host and device, and each place has its own buckets. Here float64 is on the host."""
    left = nn.Linear(4, 3, bias=False).to(place.device)
    right = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        left.weight.fill_(1)
        right.weight.fill_(1)
    parameters = [*left.parameters(), *right.parameters()]
    optimizer: Any = ct.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op="sum", ranks=comm)
    assert len({bucket.device for bucket in optimizer.reducer.buckets}) == 2
    for _ in range(2):
        optimizer.zero_grad()
        y = left(place.put(torch.full((1, 4), comm.rank + 1.0))).sum()
        z = right(torch.full((1, 4), comm.rank + 2.0, dtype=torch.float64)).sum()
        (y.cpu().double() + z).backward()
        optimizer.step()
    total = comm.size * (comm.size + 1) / 2
    assert torch.equal(left.weight.detach().cpu(), torch.full((3, 4), 1 - 2 * total))
    assert torch.equal(right.weight.detach(), torch.full((3, 4), 1 - 2 * (total + comm.size), dtype=torch.float64))


BODIES = [accumulates, keeps_gradients]
