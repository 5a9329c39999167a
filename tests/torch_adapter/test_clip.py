"""Clipping by the norm of all gradients matches torch, with the same bits on all ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch import Compression, DistributedOptimizer, clip_grad_norm_, join

from .oracle import assert_close, assert_same_everywhere, batch, gradients_of, loss_of, mine, model, parameters_of

# torch adds squares in float32 (64 numbers here: at most 64 x 2^-24 relative), commlib in float64.
FLOAT32 = 64 * 2.0**-24
LIMIT = 0.05


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (), (0, 2), (7,), (2, 2, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(gradients: list[Tensor | None]) -> list[nn.Parameter]:
    """Create parameters with these gradients."""
    parameters = []
    for gradient in gradients:
        like = torch.zeros(2) if gradient is None else torch.zeros(gradient.shape, dtype=gradient.dtype)
        parameters.append(nn.Parameter(like))
        parameters[-1].grad = None if gradient is None else gradient.clone()
    return parameters


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_clipping_matches_torch(comm: Any, dtype: torch.dtype, max_norm: float) -> None:
    ours, theirs = with_gradients([*tensors(dtype), None]), with_gradients([*tensors(dtype), None])
    norm = clip_grad_norm_(iter(ours), max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    half = dtype in (torch.float16, torch.bfloat16)  # torch rounds the norm and the factor to it
    tolerance = 2 * torch.finfo(dtype).eps if half else 1e-12 if dtype == torch.float64 else FLOAT32
    torch.testing.assert_close(norm.double(), expected.double(), rtol=tolerance, atol=0)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close([p.grad for p in ours], [p.grad for p in theirs], 2 * tolerance)
    assert_same_everywhere(comm, [norm, *(p.grad for p in ours)])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(comm: Any, value: float) -> None:
    gradients: list[Tensor | None] = [torch.ones(3), torch.tensor([2.0, value])]
    ours, theirs = with_gradients(gradients), with_gradients(gradients)
    norm, expected = clip_grad_norm_(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, equal_nan=True)


def test_without_any_gradient(comm: Any) -> None:
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0).item() == 0


def test_gradients_of_any_form(comm: Any) -> None:
    """Sparse, transposed and negated gradients, a single parameter, and different ones on each rank."""
    rows = torch.tensor([[2.0, 3.0], [4.0, 5.0], [-2.0, 3.0]])
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 3, 1]]), rows, (5, 2), check_invariants=True
    )  # row 1 twice: 0 and 6
    parameter = nn.Parameter(torch.zeros(5, 2))
    parameter.grad = sparse
    assert clip_grad_norm_(parameter, 100.0).item() == pytest.approx(math.sqrt(77), rel=1e-7)
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(math.sqrt(77), rel=1e-7)
    assert parameter.grad is not None
    expected = torch.tensor([[0, 0], [0, 6], [0, 0], [4, 5], [0, 0]]) / math.sqrt(77)
    assert_close(parameter.grad.to_dense(), expected, 1e-6)

    turned = nn.Parameter(torch.zeros(2, 3))
    turned.grad = torch.arange(6.0).reshape(3, 2).t() * (comm.rank + 1)
    assert clip_grad_norm_([turned], 1.0).item() == pytest.approx(math.sqrt(55) * (comm.rank + 1))
    assert_close(turned.grad, torch.arange(6.0).reshape(3, 2).t() / math.sqrt(55), 1e-6)

    values = torch.complex(torch.zeros(3), torch.arange(3.0)).conj().imag
    assert values.is_neg()
    negated = nn.Parameter(torch.zeros(3))
    negated.grad = values
    assert clip_grad_norm_([negated], 10.0).item() == pytest.approx(math.sqrt(5))


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_bad_arguments(comm: Any, max_norm: float) -> None:
    with pytest.raises(UsageError, match="non-negative"):
        clip_grad_norm_([], max_norm)


@pytest.mark.ranks(min=2)
def test_clipping_while_a_rank_has_joined(comm: Any) -> None:
    """Regression: clipping waited for all ranks, including those that had joined."""
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for step in range(1 + (comm.rank == 0)):
        loss_of(network, mine(comm, batch(comm, step))).backward()
        assert optimizer.clip_grad_norm(LIMIT).isfinite()
        optimizer.step()
        optimizer.zero_grad()
    assert join() == 0


@pytest.mark.parametrize("kind", ["plain", "bf16", "no backward on one rank", "no sync"])
def test_training_with_clipping(comm: Any, kind: str) -> None:
    """The optimizer's clipping method first reduces gradients that are not reduced yet."""
    network, alone = model(), model()
    options: Any = {"compression": Compression.bf16} if kind == "bf16" else {}
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), **options)
    its = torch.optim.SGD(alone.parameters(), lr=0.1)
    absent = comm.size - 1 if kind == "no backward on one rank" and comm.size > 1 else None
    for step in range(3):
        rows = batch(comm, step)
        if kind == "no sync":
            with optimizer.no_sync():
                loss_of(network, mine(comm, rows)).backward()
        elif comm.rank != absent:
            loss_of(network, mine(comm, rows)).backward()
        norm = optimizer.clip_grad_norm(LIMIT)
        assert_same_everywhere(comm, [norm, *gradients_of(network)])
        optimizer.step()
        optimizer.zero_grad()
        present = 4 * (comm.size if absent is None else comm.size - 1)
        (loss_of(alone, (rows[0][:present], rows[1][:present])) * present / (4 * comm.size)).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)
        assert expected > LIMIT
        # bfloat16 has 8 bits: 2^-8 relative in each gradient.
        assert norm.item() == pytest.approx(expected.item(), rel=2.0**-8 if kind == "bf16" else 1e-12)
        its.step()
        its.zero_grad()
    assert_close(parameters_of(network), parameters_of(alone), 0.1 * 3 * LIMIT * 2.0**-8 if kind == "bf16" else 1e-12)
    if comm.size > 1:
        assert optimizer.statistics.reductions == 3
