"""Bodies of tests: verbs on tensors of a device, in call order and by name. See `place`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import commlib_torch as ct
from tests.bodies import verb_gradients
from tests.torch_adapter import values
from tests.torch_adapter.place import Place


def there(place: Place, got: Any) -> Tensor:
    """Check that a result is on the device, and return it as a host tensor."""
    assert isinstance(got, Tensor)
    assert got.device.type == place.device
    return got.detach().cpu()


def total(parts: list[Tensor]) -> Tensor:
    stacked = torch.stack(parts)
    return stacked.any(0) if stacked.dtype == torch.bool else stacked.sum(0).to(stacked.dtype)


def reductions(comm: Any, place: Place, dtype: torch.dtype, form: str = "plain") -> None:
    """Run all_reduce, reduce and reduce_scatter, blocking and not, into new tensors and in place."""
    parts = values.everyone(comm, dtype, form)
    last, expected = comm.size - 1, total(parts)

    def own() -> Tensor:
        return values.FORMS[form](place.put(values.of(comm.rank, dtype)))

    mine = own()
    values.check(there(place, ct.all_reduce(mine, ranks=comm)), expected)
    values.check(there(place, ct.all_reduce_async(mine, ranks=comm).wait()), expected)
    values.check(there(place, mine), parts[comm.rank])  # untouched
    assert ct.all_reduce_(mine, ranks=comm) is mine
    values.check(there(place, mine), expected)
    mine = own()
    work = ct.all_reduce_async_(mine, ranks=comm)
    assert work.wait(host=True) is mine is work.result()
    assert work.done() and work.exception() is None
    values.check(there(place, mine), expected)
    for got in (ct.reduce(own(), root=last, ranks=comm), ct.reduce_async(own(), root=last, ranks=comm).wait()):
        if comm.rank == last:
            values.check(there(place, got), expected)
        else:
            assert got is None
    prefix = total(parts[: comm.rank + 1])
    for got in (ct.scan(own(), ranks=comm), ct.scan_async(own(), ranks=comm).wait()):
        values.check(there(place, got), prefix)
    rows = values.share(len(expected), comm.size, comm.rank)
    shares = [values.share(len(expected), comm.size, rank) for rank in range(comm.size)]
    counts = [share.stop - share.start for share in shares]
    for asked in (counts, place.put(torch.tensor(counts))):
        values.check(there(place, ct.reduce_scatter_v(own(), asked, ranks=comm)), expected[rows])
    for got in (ct.reduce_scatter(own(), ranks=comm), ct.reduce_scatter_async(own(), ranks=comm).wait()):
        values.check(there(place, got), expected[rows])


def movement(comm: Any, place: Place, dtype: torch.dtype) -> None:
    """Run all verbs that move data, blocking and not."""
    size, rank, last = comm.size, comm.rank, comm.size - 1
    parts = values.everyone(comm, dtype)
    mine = place.put(parts[rank])
    for got in (ct.broadcast(mine, root=last, ranks=comm), ct.broadcast_async(mine, root=last, ranks=comm).wait()):
        values.check(there(place, got), parts[last])
    values.check(there(place, mine), parts[rank])
    for got in (ct.all_gather(mine, ranks=comm), ct.all_gather_async(mine, ranks=comm).wait()):
        values.check(there(place, got), torch.cat(parts))
    uneven = [part[: number + 1] for number, part in enumerate(parts)]
    for got in (
        ct.all_gather_v(mine[: rank + 1], ranks=comm),
        ct.all_gather_v_async(mine[: rank + 1], ranks=comm).wait(),
    ):
        values.check(there(place, got), torch.cat(uneven))
    gathered = ct.gather(mine, last, ranks=comm)
    if rank == last:
        values.check(there(place, gathered), torch.cat(parts))
    whole = torch.cat(parts)
    given = place.put(whole) if rank == last else None
    for got in (ct.scatter(given, last, ranks=comm), ct.scatter_async(given, last, ranks=comm).wait()):
        values.check(there(place, got), parts[rank])
    pieces = place.put(torch.cat([values.of(rank + 10 * peer, dtype, 2) for peer in range(size)]))
    came = torch.cat([values.of(peer + 10 * rank, dtype, 2) for peer in range(size)])
    for got in (ct.all_to_all(pieces, ranks=comm), ct.all_to_all_async(pieces, ranks=comm).wait()):
        values.check(there(place, got), came)
    splits = [(rank + peer) % 2 for peer in range(size)]
    rows = torch.cat([values.of(peer, dtype, (rank + peer) % 2) for peer in range(size)])
    expected = torch.cat([values.of(rank, dtype, (peer + rank) % 2) for peer in range(size)])
    for asked in (splits, torch.tensor(splits), place.put(torch.tensor(splits))):
        got, counts = ct.all_to_all_v(place.put(rows), asked, ranks=comm)
        values.check(there(place, got), expected)
        assert counts.tolist() == [(peer + rank) % 2 for peer in range(size)]
    around = (rank + 1) % size, (rank - 1) % size
    room = place.put(torch.zeros_like(parts[rank]))
    assert ct.send_recv(mine, around[0], room, around[1], ranks=comm) is room
    values.check(there(place, room), parts[around[1]])
    if size > 1 and rank < 2:
        turned = place.put(parts[rank].t())  # data is received into the right elements, whatever the strides
        if rank == 0:
            ct.send(turned, 1, 5, ranks=comm)
        else:
            got = ct.recv_async(turned.t().contiguous().t(), 0, 5, ranks=comm).wait()
            values.check(there(place, got), parts[0].t())


def by_name(comm: Any, place: Place) -> None:
    """Submit operations by name, in a different order on each rank, and groups of them."""
    parts = values.everyone(comm)
    mine = place.put(parts[comm.rank])
    names = [f"tensor {number}" for number in range(3)]
    if comm.rank % 2:
        names.reverse()
    works = {name: ct.allreduce_async(mine + int(name[-1]), name=name, op=ct.Sum) for name in names}
    for name, work in works.items():
        values.check(there(place, ct.synchronize(work)), total(parts) + comm.size * int(name[-1]))
    for dtype in values.ALL:
        own = place.put(values.of(comm.rank, dtype))
        everyone = values.everyone(comm, dtype)
        values.check(there(place, ct.allreduce(own, op=ct.Sum)), total(everyone))
        values.check(there(place, ct.allgather(own[: comm.rank + 1])), torch.cat(rows_of(everyone)))
        assert ct.broadcast_(own, comm.size - 1) is own
        values.check(there(place, own), everyone[-1])
    turned = place.put(parts[comm.rank]).t()
    assert ct.allreduce_(turned, op=ct.Sum) is turned
    values.check(there(place, turned), total(parts).t())
    several = [place.put(values.of(comm.rank, dtype)) for dtype in values.FLOATS]
    for got, dtype in zip(ct.grouped_allreduce(several, op=ct.Sum), values.FLOATS, strict=True):
        values.check(there(place, got), total(values.everyone(comm, dtype)))
    rows = values.share(6, comm.size, comm.rank)
    values.check(there(place, ct.reducescatter(mine, op=ct.Sum)), total(parts)[rows])
    got, counts = ct.alltoall(place.put(torch.cat([parts[comm.rank]] * comm.size)), torch.tensor([6] * comm.size))
    values.check(there(place, got), torch.cat(parts))
    assert counts.tolist() == [6] * comm.size


def rows_of(parts: list[Tensor]) -> list[Tensor]:
    return [part[: number + 1] for number, part in enumerate(parts)]


def gradients_by_name(comm: Any, place: Place) -> None:
    """Operations by name have the same gradients as on the host."""
    rank, size = comm.rank, comm.size

    def gradients(put: Any) -> list[Tensor]:
        x = put(values.of(rank, torch.float64)).requires_grad_()
        factor = put(values.of(rank + 1, torch.float64))
        splits = torch.tensor([6 // size] * size)
        outputs = (
            ct.allreduce(x, name="a") * factor,
            ct.allgather(x[: rank + 1], name="b").square(),
            ct.broadcast(x, size - 1, name="c") * factor,
            ct.reducescatter(x, name="d").square(),
            ct.alltoall(x, splits, name="e")[0].square(),
        )
        return [torch.autograd.grad(output.sum(), x)[0] for output in outputs]

    with place.host():
        expected = gradients(torch.Tensor.clone)
    for got, same in zip(gradients(place.put), expected, strict=True):
        torch.testing.assert_close(there(place, got), same, rtol=1e-12, atol=1e-12)


def gradients(comm: Any, place: Place) -> None:
    """The ordered verbs have the gradients of one process."""
    for case in verb_gradients.CASES.values():

        def differentiate(x: Any, weights: Any, case: verb_gradients.Case = case) -> tuple[Any, Any, Any]:
            tensor = place.put(torch.tensor(x)).requires_grad_()
            result = case.call(ct, tensor, comm, lambda shape: place.put(torch.zeros(shape, dtype=torch.float64)))
            loss = (place.put(torch.tensor(weights)) * result.square()).sum()
            (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
            (second,) = torch.autograd.grad(gradient.square().sum(), tensor)
            return tuple(there(place, one).numpy() for one in (result, gradient, second))  # type: ignore[return-value]

        verb_gradients.check(case, comm, differentiate)


def moves(comm: Any, place: Place) -> None:
    """The moves of tensor parallelism, forward and backward."""
    parts = [values.of(rank, torch.float64, rows=2 * comm.size) for rank in range(comm.size)]

    def run(put: Any) -> list[Tensor]:
        results = []
        for move in (ct.tensor.copy, ct.tensor.reduce, ct.tensor.scatter, ct.tensor.gather, ct.tensor.reduce_scatter):
            x = put(parts[comm.rank]).requires_grad_()
            y = move(x, comm)
            y.square().sum().backward()
            assert x.grad is not None
            results += [y.detach(), x.grad]
        return results

    with place.host():
        expected = run(torch.Tensor.clone)
    for got, same in zip(run(place.put), expected, strict=True):
        values.check(there(place, got), same)


BODIES = [by_name, gradients_by_name, gradients, moves]
