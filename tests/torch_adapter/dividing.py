"""Comparisons of a divided model with the plain one: values and gradients are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from commlib import Communicator
from commlib.schedule.layout import even
from commlib.tensor_parallel import Plan
from commlib_torch.tensor import parallelize, shard_of

TOLERANCE = 1e-12


class Pair(NamedTuple):
    """A plain model and its divided copy."""

    plain: Any
    divided: Any


def pair(axis: Communicator, make: Callable[[], nn.Module], plan: Plan, seed: int = 0) -> Pair:
    """Build a plain model in float64, and the same one divided by a plan."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = make().double()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype))
    return Pair(plain, parallelize(copy.deepcopy(plain), axis, plan))


def random(*shape: int, seed: int = 1) -> Tensor:
    """Return the same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shard(x: Tensor, axis: Communicator, dim: int | None) -> Tensor:
    """Return this rank's shard along a dimension, or everything for None."""
    if dim is None:
        return x
    start, stop = even(x.shape[dim], axis.size).slice_of(axis.rank)
    return x.narrow(dim, start, stop - start)


def own_head(axis: Communicator, dim: int = -1) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts this rank's part out of an output that stays divided."""
    return lambda whole: shard(whole, axis, dim)


def assert_equal(got: Tensor | None, expected: Tensor | None, what: str = "", tolerance: float = TOLERANCE) -> None:
    """Compare tensors relative to the largest element."""
    if got is None or expected is None:
        assert got is expected, what
        return
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        got, expected, rtol=0, atol=tolerance * max(largest, 1e-300), msg=lambda m: f"{what}: {m}"
    )


def assert_same_gradients(models: Pair, tolerance: float = TOLERANCE) -> None:
    """Compare the gradients of all weights: shards with the matching parts of the plain ones."""
    for (name, plain), divided in zip(models.plain.named_parameters(), models.divided.parameters(), strict=True):
        expected, held = plain.grad, shard_of(divided)
        if held is not None and expected is not None:
            expected = torch.from_numpy(held.own(expected.numpy()))
        assert_equal(divided.grad, expected, name, tolerance)


def check(
    axis: Communicator,
    models: Pair,
    *inputs: Tensor,
    shards: int | None = None,
    part: Callable[[Tensor], Tensor] = lambda whole: whole,
    **options: Any,
) -> None:
    """Compare outputs, and gradients of inputs and weights, for a loss with a different factor for each output.

    shards: the dimension along which inputs are divided. part: this rank's part of the output.
    """
    whole = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    own = [shard(x, axis, shards).detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    expected, got = models.plain(*whole, **options), models.divided(*own, **options)
    factors = random(*expected.shape, seed=9)
    assert_equal(got, part(expected), "output")
    for model in models:
        model.zero_grad()
    (expected * factors).sum().backward()
    (got * part(factors)).sum().backward()
    for index, (one, other) in enumerate(zip(own, whole, strict=True)):
        if other.grad is not None:
            assert_equal(one.grad, shard(other.grad, axis, shards), f"input {index}")
    assert_same_gradients(models)
