"""SyncBatchNorm equals nn.BatchNorm on the concatenated batches of all ranks."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib_torch as hvd

from .oracle import assert_close, assert_same_everywhere

LAYERS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CHANNELS = 3


def inputs(rank: int, rows: int, dimensions: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (rows, CHANNELS, *range(2, dimensions))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * (rank + 1) + 5 * rank).to(dtype)


def with_parameters(layer: Any) -> Any:
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            layer.bias.copy_(torch.tensor([1.0, -1.0, 3.0]))
    return layer


def compare(comm: Any, layer: Any, plain: Any, rows: list[int], dimensions: int = 4, **how: Any) -> None:
    """Train both for some steps, forward and backward, and compare all results."""
    dtype = how.get("dtype", torch.float64)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for step in range(3):
        parts = [inputs(rank, n, dimensions, dtype, step) for rank, n in enumerate(rows)]
        mine, whole = parts[comm.rank].requires_grad_(), torch.cat(parts).detach().requires_grad_()
        own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
        factors = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        got, expected = layer(mine), plain(whole)
        assert got.dtype == expected.dtype
        assert_close(got, expected[own], tolerance)
        (got * factors[own]).sum().backward()
        (expected * factors).sum().backward()
        assert whole.grad is not None
        assert_close(mine.grad, whole.grad[own], tolerance)
        for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
            total = hvd.allreduce(one.grad, op=hvd.Sum)  # as an optimizer does
            assert_close(total, other.grad, 10 * tolerance)
            one.grad = other.grad = None
        for one, other in zip(layer.buffers(), plain.buffers(), strict=True):
            assert_close(one, other, tolerance)
    assert_same_everywhere(comm, list(layer.buffers()))
    layer.eval()
    plain.eval()
    assert_close(layer(parts[comm.rank]), plain(parts[comm.rank]), tolerance)


@pytest.mark.parametrize("dimensions", LAYERS)
def test_every_number_of_dimensions(comm: Any, dimensions: int) -> None:
    layer = with_parameters(hvd.SyncBatchNorm(CHANNELS, dtype=torch.float64))
    compare(
        comm, layer, with_parameters(LAYERS[dimensions](CHANNELS, dtype=torch.float64)), [4] * comm.size, dimensions
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(comm: Any, dtype: torch.dtype) -> None:
    layer, plain = hvd.SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    if dtype == torch.float64:
        layer, plain = layer.double(), plain.double()
    compare(comm, with_parameters(layer), with_parameters(plain), [4] * comm.size, dtype=dtype)


@pytest.mark.parametrize("rows", ["uneven", "none on rank 0", "one value on the last rank"])
def test_uneven_batches(comm: Any, rows: str) -> None:
    counts = {
        "uneven": [rank + 2 for rank in range(comm.size)],
        "none on rank 0": [0, *[3] * (comm.size - 1)] if comm.size > 1 else [3],
        "one value on the last rank": [*[3] * (comm.size - 1), 1] if comm.size > 1 else [2],
    }[rows]
    layer, plain = hvd.SyncBatchNorm(CHANNELS, dtype=torch.float64), nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    compare(comm, with_parameters(layer), with_parameters(plain), counts, dimensions=2)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None}, {"momentum": 0.5, "eps": 0.1}, {"affine": False}, {"track_running_stats": False},
    ],
    ids=str,
)  # fmt: skip
def test_arguments(comm: Any, options: dict[str, Any]) -> None:
    layer = hvd.SyncBatchNorm(CHANNELS, **options, dtype=torch.float64)
    plain = nn.BatchNorm2d(CHANNELS, **options, dtype=torch.float64)
    compare(comm, with_parameters(layer), with_parameters(plain), [3] * comm.size)


@pytest.mark.ranks(min=2)
def test_large_means_lose_no_precision(comm: Any) -> None:
    """A mean of 10^4 and a deviation of 10^-1 in float32: the squares differ in the tenth digit."""
    layer = hvd.SyncBatchNorm(1, affine=False)
    noise = torch.randn(1000, 1, generator=torch.Generator().manual_seed(comm.rank)) / 10
    x = 1e4 + noise
    whole = hvd.allgather(x).double()
    layer(x)
    expected = 0.9 + 0.1 * whole.var(0).item()
    assert layer.running_var is not None
    assert layer.running_var.item() == pytest.approx(expected, rel=1e-6)


def test_too_few_values(comm: Any) -> None:
    """All ranks together have one value: an error on each, as in nn.BatchNorm."""
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1 if comm.rank == 0 else 0, CHANNELS))
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.ones(3))
    if comm.size > 1:
        with pytest.raises(ValueError, match="expected 3 channels"):
            layer(torch.ones(3, 4))


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(),
            nn.Sequential(nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2, momentum=None)), nn.Flatten(), nn.Linear(8, 1),
        ).double()  # fmt: skip


def test_convert_and_train(comm: Any) -> None:
    """A converted model on P ranks trains like the plain one on the whole batch."""
    converted, alone = hvd.convert_sync_batchnorm(network()), network()
    kinds = [type(module) for module in converted.modules()]
    assert kinds.count(hvd.SyncBatchNorm) == 2 and nn.BatchNorm2d not in kinds
    assert list(converted.state_dict()) == list(alone.state_dict())
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(converted.parameters(), lr=0.1))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        parts = [
            torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)
            for rank in range(comm.size)
        ]
        optimizer.zero_grad()
        converted(parts[comm.rank]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        alone(torch.cat(parts)).square().mean().backward()
        plain.step()
    assert_close(list(converted.state_dict().values()), list(alone.state_dict().values()), 1e-9)


def test_conversion_keeps_attributes(comm: Any) -> None:
    plain = nn.BatchNorm1d(3, eps=0.5, momentum=0.25)
    weight = plain.weight
    plain(torch.randn(4, 3))
    layer: Any = hvd.convert_sync_batchnorm(plain.eval())
    assert isinstance(layer, hvd.SyncBatchNorm) and not layer.training
    assert (layer.eps, layer.momentum) == (0.5, 0.25)
    assert layer.weight is weight and layer.running_mean is plain.running_mean
    assert hvd.convert_sync_batchnorm(layer) is layer
    assert "0.5" in repr(layer)
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(clone(torch.ones(2, 3)), layer(torch.ones(2, 3)), 0)
        assert clone.weight is not layer.weight
    linear = nn.Linear(1, 1)
    assert hvd.convert_sync_batchnorm(linear) is linear
