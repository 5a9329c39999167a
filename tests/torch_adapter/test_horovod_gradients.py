"""Verbs by name have the right backward."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import commlib_torch as hvd
from commlib.errors import UsageError

from .values import check, share

names = (f"gradient test {number}" for number in itertools.count())
NAMED = pytest.mark.parametrize("named", [True, False])


def weights(rank: int, rows: int) -> Tensor:
    """The gradient of a rank's result, which differs between ranks."""
    return torch.mul(torch.arange(rows * 2.0).reshape(rows, 2) + 1, 2**rank)


def leaf(comm: Any, rows: int = 4) -> Tensor:
    return torch.full((rows, 2), comm.rank + 1.0, requires_grad=True)


def name_of(named: bool) -> str | None:
    return next(names) if named else None


@NAMED
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_allreduce(comm: Any, op: Any, named: bool) -> None:
    x = leaf(comm)
    out = hvd.allreduce(x, name=name_of(named), op=op, prescale_factor=0.5, postscale_factor=4.0)
    out.backward(weights(comm.rank, 4))
    summed = 2.0 * sum(weights(rank, 4) for rank in range(comm.size))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, summed / comm.size if op == hvd.Average else summed)


def test_operations_without_a_gradient(comm: Any) -> None:
    out = hvd.allreduce(leaf(comm), op=hvd.Max)
    with pytest.raises(UsageError, match="op MAX has no gradient"):
        out.sum().backward()


def test_grouped_allreduce(comm: Any) -> None:
    x, y = leaf(comm), leaf(comm, 2)
    counts = torch.tensor([comm.rank])
    first, second, numbers = hvd.grouped_allreduce([x, y, counts], op=hvd.Sum, name=next(names))
    check(numbers, torch.tensor([sum(range(comm.size))]))
    (first.sum() + (second * weights(comm.rank, 2)).sum()).backward()
    check(x.grad, torch.full((4, 2), float(comm.size)))
    check(y.grad, torch.as_tensor(sum(weights(rank, 2) for rank in range(comm.size))))
    x.grad = None
    first, _ = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    first.sum().backward()  # the other result has no gradient
    check(x.grad, torch.full((4, 2), float(comm.size)))


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_through_compression(comm: Any, compression: Any) -> None:
    x = leaf(comm)
    hvd.allreduce(x, compression=compression, op=hvd.Sum).sum().backward()
    check(x.grad, torch.full((4, 2), float(comm.size)))


@NAMED
def test_allgather(comm: Any, named: bool) -> None:
    """Ranks have different numbers of rows, one of them none."""
    rows = [(rank + 1) % 3 for rank in range(comm.size)]
    start = sum(rows[: comm.rank])
    x, y = leaf(comm, rows[comm.rank]), leaf(comm, 2)
    out = hvd.allgather(x, name=name_of(named))
    out.backward(weights(comm.rank, sum(rows)))
    mean = torch.as_tensor(sum(weights(rank, sum(rows)) for rank in range(comm.size))) / comm.size
    assert x.grad is not None
    torch.testing.assert_close(x.grad, mean[start : start + rows[comm.rank]])
    x.grad = None
    first, second = hvd.grouped_allgather([x, y], name=name_of(named))
    ((first * weights(comm.rank, sum(rows))).sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, mean[start : start + rows[comm.rank]])
    torch.testing.assert_close(y.grad, torch.ones(2, 2))


@NAMED
def test_broadcast(comm: Any, named: bool) -> None:
    x, root = leaf(comm), comm.size - 1
    hvd.broadcast(x, root, name=name_of(named)).backward(weights(comm.rank, 4))
    mean = torch.as_tensor(sum(weights(rank, 4) for rank in range(comm.size))) / comm.size
    assert x.grad is not None
    torch.testing.assert_close(x.grad, mean if comm.rank == root else torch.zeros(4, 2))


@NAMED
def test_alltoall(comm: Any, named: bool) -> None:
    """Each rank receives the gradients of its own rows; rows that were not sent have zeros."""
    splits = [peer + 1 for peer in range(comm.size)]
    x = leaf(comm, sum(splits) + 1)
    out, received = hvd.alltoall(x, torch.tensor(splits), name=name_of(named))
    assert received.tolist() == [comm.rank + 1] * comm.size and not received.requires_grad
    out.backward(torch.full_like(out, 10.0 + comm.rank))
    rows = [torch.full((n, 2), 10.0 + peer) for peer, n in enumerate(splits)]
    check(x.grad, torch.cat([*rows, torch.zeros(1, 2)]))
    y = leaf(comm, 2 * comm.size)
    hvd.alltoall(y).backward(torch.full((2 * comm.size, 2), 10.0 + comm.rank))
    check(y.grad, torch.cat([torch.full((2, 2), 10.0 + peer) for peer in range(comm.size)]))


@NAMED
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_reducescatter(comm: Any, op: Any, named: bool) -> None:
    x = leaf(comm, 5)
    out = hvd.reducescatter(x, name_of(named), op=op, prescale_factor=0.5, postscale_factor=4.0)
    out.backward(torch.full_like(out, 1.0 + comm.rank))
    expected = torch.empty(5, 2)
    for rank in range(comm.size):
        expected[share(5, comm.size, rank)] = 2 * (1.0 + rank) * (comm.size if op == hvd.Sum else 1)
    check(x.grad, expected)
    x.grad = None
    torch.cat(hvd.grouped_reducescatter([x, x * 2], op=hvd.Average)).sum().backward()
    check(x.grad, torch.full((5, 2), 3.0))


@pytest.mark.ranks(min=2)
def test_gradient_of_a_gradient_of_broadcast(comm: Any) -> None:
    """Regression: only the root computed it, and waited for the other ranks."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.broadcast(x, 0) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first.detach(), 3 * x.detach() ** 2 * (comm.rank == 0))
    torch.testing.assert_close(second, 6 * x.detach() * (comm.rank == 0) / comm.size)


def test_gradients_of_gradients(comm: Any) -> None:
    x = leaf(comm)
    (first,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum).square().sum() / 2, x, create_graph=True)
    first.sum().backward()  # first is size times the sum over ranks
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((4, 2), float(comm.size**2)))


def test_nothing_is_recorded_without_need(comm: Any) -> None:
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(leaf(comm)).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(leaf(comm))).requires_grad
