"""Bodies of tests: processing gradients on a device gives the results of the host. See `place`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import commlib_torch as ct
from tests.torch_adapter.device_training import Sum, batch, is_seldom, loss_of, own_loss, part, whole_loss, wrapped
from tests.torch_adapter.place import Place


def compresses(comm: Any, place: Place, compression: Any, near: float = 0.0) -> None:
    """Compressed buckets match the host, including the error that is fed back and saved."""

    def run(device: str, put: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Any]:
        weight = nn.Parameter(torch.zeros(40, 30, device=device))
        bias = nn.Parameter(torch.zeros(70, device=device))
        options = {"compression": compression, "compress_within_node": True, "ranks": comm, "overlap": True}
        optimizer: Any = ct.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=1.0), **options)
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * comm.rank + step)
            scale = torch.randn(40, 30, generator=generator), torch.randn(70, generator=generator)
            ((weight * put(scale[0])).sum() + (bias * put(scale[1])).sum()).backward()
            optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return [weight.detach().cpu(), bias.detach().cpu()], saved.get("commlib")

    with place.host():
        expected, state = run("cpu", torch.Tensor.clone)
    result, remembered = run(place.device, place.put)
    for got, same in zip(result, expected, strict=True):
        torch.testing.assert_close(got, same, rtol=near, atol=near)
    for name, known in (state["parameters"] if state else {}).items():
        for what, value in known.items():
            got = remembered["parameters"][name][what]
            torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(value), rtol=near, atol=near)


def clips(comm: Any, place: Place) -> None:
    """The norm and the clipped gradients match those of one process."""
    model = Sum().to(place.device)
    called, optimizer = wrapped(comm, model, "DistributedOptimizer")
    own_loss(comm, called, place, 1).backward()
    norm = optimizer.clip_grad_norm(0.5)
    assert norm.device.type == place.device
    with place.host():
        whole = Sum()
        whole_loss(comm, whole, 1).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    torch.testing.assert_close(norm.cpu(), expected)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def scales_losses(comm: Any, place: Place) -> None:
    """All ranks skip a step if the loss of one of them is not finite."""
    model = Sum(torch.float32).to(place.device)
    called, optimizer = wrapped(comm, model, "DistributedOptimizer")
    scaler = ct.GradScaler(place.device, ranks=comm, init_scale=4.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        x, y = (place.put(values.float()) for values in part(comm, batch(comm, 1)))
        loss = loss_of(called(x, is_seldom(comm, comm.rank)), y)
        scaler.scale(loss * (float("inf") if step == 0 and comm.rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert any(changed) == (step == 1)
    assert scaler.get_scale() == 2.0


def broadcasts(comm: Any, place: Place) -> None:
    """Parameters and optimizer state become those of the root and stay on their device."""
    model = Sum().to(place.device)
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * (comm.rank + 1))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, comm.rank + number)
    adam.step()
    ct.broadcast_parameters(model.state_dict(), ranks=comm)
    ct.broadcast_optimizer_state(adam, ranks=comm)
    assert adam.param_groups[0]["lr"] == 0.1
    for number, parameter in enumerate(model.parameters()):
        assert parameter.device.type == place.device == adam.state[parameter]["exp_avg"].device.type
        values = parameter.detach()
        assert torch.equal(ct.all_reduce(values, "max", ranks=comm), ct.all_reduce(values, "min", ranks=comm))
        torch.testing.assert_close(
            adam.state[parameter]["exp_avg"].cpu(), torch.full(values.shape, 0.1 * number).double()
        )


def normalises(comm: Any, place: Place) -> None:
    """SyncBatchNorm equals BatchNorm on the batches of all ranks."""
    xs = [torch.arange(24.0).double().view(4, 3, 2) * (rank + 1) for rank in range(comm.size)]
    layer = ct.SyncBatchNorm(3).double().to(place.device)
    mine = place.put(xs[comm.rank]).requires_grad_()
    y = layer(mine)
    y.pow(3).sum().backward()
    with place.host():
        plain, whole = nn.BatchNorm1d(3).double(), torch.cat(xs).requires_grad_()
        expected = plain(whole)
        expected.pow(3).sum().backward()
    own = slice(4 * comm.rank, 4 * comm.rank + 4)
    assert whole.grad is not None and mine.grad is not None and layer.running_var is not None
    torch.testing.assert_close(y.detach().cpu(), expected.detach()[own])
    torch.testing.assert_close(mine.grad.cpu(), whole.grad[own])
    torch.testing.assert_close(layer.running_var.cpu(), plain.running_var)


def gathers_rows(comm: Any, place: Place) -> None:
    """Sparse gradients are gathered, separately from buckets, from the first step on, in which ranks discover them."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True).double().to(place.device)
    head = nn.Linear(3, 1, bias=False).double().to(place.device)
    named = [("table", table.weight), ("head", head.weight)]
    start = table.weight.detach().clone()
    optimizer: Any = ct.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=1.0), named, op="sum", ranks=comm
    )
    for _ in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            head.weight.fill_(1.0)
        head(table(place.put(torch.tensor([comm.rank, 9])))).sum().backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        optimizer.step()
    counts = torch.tensor([*[1.0] * comm.size, *[0.0] * (9 - comm.size), comm.size]).double()
    torch.testing.assert_close(table.weight.detach().cpu(), start.cpu() - 2 * counts[:, None].expand(10, 3))


def gathers_rows_of_some(comm: Any, place: Place) -> None:
    """A rank without a gradient contributes no rows and receives those of the others; averages divide by all ranks."""
    table = nn.Embedding(7, 2, sparse=True).to(place.device)
    with torch.no_grad():
        table.weight.zero_()
    sgd = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer: Any = ct.DistributedOptimizer(sgd, table.named_parameters(), op="mean", ranks=comm)
    for step in range(3):
        optimizer.zero_grad()
        if step == 0 or comm.rank == 0:
            table(place.put(torch.tensor([step, 6, 6]))).sum().backward()
        optimizer.step()
    share = 1 / comm.size
    expected = torch.tensor([1, share, share, 0, 0, 0, 2 + 4 * share])
    torch.testing.assert_close(-table.weight.detach().cpu(), expected[:, None].expand(7, 2))


BODIES = [clips, scales_losses, broadcasts, normalises, gathers_rows, gathers_rows_of_some]
