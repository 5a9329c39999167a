"""Moves of tensors: values, gradients and second gradients compared with the whole tensor in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from commlib.errors import UsageError
from commlib_torch.tensor import all_to_all, copy, gather, reduce, reduce_scatter, scatter

SHAPE = (3, 7, 5)


def whole(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shard(x: Tensor, comm: Any, dim: int) -> Tensor:
    """Return the rank's part: the first ranks have one more element."""
    own: Tensor = x.tensor_split(comm.size, dim)[comm.rank]
    return own


def gradient(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Differentiate a loss whose gradient depends on `out`, so that a second one exists."""
    result: Tensor = torch.autograd.grad((out.pow(3) * weight).sum(), x, create_graph=True)[0]
    return result


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_copy_sums_gradients(comm: Any) -> None:
    x = whole().requires_grad_()
    weights = [whole(rank + 1) for rank in range(comm.size)]
    first = gradient(copy(x, comm), x, weights[comm.rank])
    twin = whole().requires_grad_()
    plain = gradient(twin, twin, sum(weights, torch.zeros(())))
    close(first, plain)
    second = torch.autograd.grad(first.sum(), x)[0]  # a loss that all ranks compute
    close(second, torch.autograd.grad(plain.sum(), twin)[0])


def test_reduce_sums_and_copies_gradients(comm: Any) -> None:
    parts = [whole(rank).requires_grad_() for rank in range(comm.size)]
    own = whole(comm.rank).requires_grad_()
    out = reduce(own, comm)
    close(out, sum(parts, torch.zeros(())))
    first = gradient(out, own, whole(9))
    plain = gradient(sum(parts, torch.zeros(())), parts[comm.rank], whole(9))
    close(first, plain)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_and_gather(comm: Any, dim: int) -> None:
    x = whole().requires_grad_()
    own = scatter(x, comm, dim)
    close(own, shard(x, comm, dim))
    back = gather(own, comm, dim)
    close(back, x)
    close(gradient(back, x, whole(1)), 3 * whole().square() * whole(1))
    weight = whole(2)
    close(gradient(own, x, shard(weight, comm, dim)), 3 * whole().square() * weight)  # joined from all ranks


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_partial_gather_sums_gradients(comm: Any, dim: int) -> None:
    own = shard(whole(), comm, dim).clone().requires_grad_()
    weights = [whole(rank + 1) for rank in range(comm.size)]
    result = gradient(gather(own, comm, dim, partial=True), own, weights[comm.rank])
    close(result, shard(3 * whole().square() * sum(weights, torch.zeros(())), comm, dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter(comm: Any, dim: int) -> None:
    own = whole(comm.rank).requires_grad_()
    total = sum((whole(rank) for rank in range(comm.size)), torch.zeros(()))
    out = reduce_scatter(own, comm, dim)
    close(out, shard(total, comm, dim))
    close(gradient(out, own, shard(whole(7), comm, dim)), 3 * total.square() * whole(7))


@pytest.mark.parametrize(("divide", "join"), [(0, 1), (2, 0), (1, 2)])
def test_all_to_all(comm: Any, divide: int, join: int) -> None:
    own = shard(whole(), comm, join).clone().requires_grad_()
    out = all_to_all(own, comm, divide, join)
    close(out, shard(whole(), comm, divide))
    result = gradient(out, own, shard(whole(3), comm, divide))
    close(result, shard(3 * whole().square() * whole(3), comm, join))
    twice = torch.autograd.grad(result.sum(), own)[0]
    close(twice, shard(6 * whole() * whole(3), comm, join))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(comm: Any, dtype: torch.dtype) -> None:
    x = torch.arange(12.0).reshape(3, 4).to(dtype).t()
    torch.testing.assert_close(reduce(x, comm), x * comm.size)
    torch.testing.assert_close(gather(scatter(x, comm, 1), comm, 1), x)


def test_integers_have_no_gradient(comm: Any) -> None:
    x = torch.arange(6)
    assert torch.equal(reduce(x, comm), x * comm.size)
    assert not gather(scatter(x, comm), comm).requires_grad


@pytest.mark.ranks(min=2)
def test_invalid_arguments_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="has no dimension 3"):
        scatter(whole(), comm, 3)
    with pytest.raises(UsageError, match="expected a Communicator"):
        reduce(whole(), "tp")  # type: ignore[arg-type]
    moves: Any = (copy, reduce, scatter, gather, reduce_scatter)
    for move in moves:
        with pytest.raises(UsageError, match=f"{move.__name__}: expected a torch tensor, got int"):
            move(3, comm)
