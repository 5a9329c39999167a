"""Experts of one rank as one module, whose parameters have the experts along their first dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.expert.placement import Placement
from commlib.expert.ranks import ExpertRanks, shard_for
from commlib.functional.shards import part
from commlib.tensor.sharding import Nested, Sharding
from commlib.tensor.streams import fold
from commlib_torch._bridge import array_of, to_tensor
from commlib_torch._shards import describe, shards_of
from commlib_torch.expert._grouped import grouped_linear
from commlib_torch.tensor._dividing import take_own_when_loaded
from commlib_torch.tensor.optimizing import watch_optimizers


def stacked(
    what: str,
    make: Callable[[], nn.Module],
    seed: int,
    placement: Placement,
    ranks: ExpertRanks,
    divided: Mapping[str, Sharding],
) -> nn.Module:
    """Return the experts of this rank, made one by one as `make` makes one when PyTorch is seeded for it.

    The values of an expert depend on the seed and its number alone, not on the ranks. Its parameters are marked as
    parts of those of all experts. divided: how parameters of one expert, by their names, are divided among ranks of
    tensor parallelism, if there are any. Raises UsageError for modules that cannot be stacked.
    """
    made = []
    for expert in placement.of_rank(ranks.axis.rank):
        with seeded(fold(seed, expert)):
            made.append(make())
    whole = made[0]
    _check(what, made)
    others = [dict(each.named_parameters()) for each in made]
    for name, parameter in list(whole.named_parameters()):
        inner, _, last = name.rpartition(".")
        values = torch.stack([other[name].detach() for other in others])
        shard = shard_for((len(placement.owners), *parameter.shape), divided.get(name), ranks)
        if isinstance(shard.sharding, Nested):
            tensor = ranks.tensor
            assert tensor is not None
            values = to_tensor(part(array_of(values), shard.sharding.inner, tensor.rank, tensor.size))
        stack = nn.Parameter(values, requires_grad=parameter.requires_grad)
        setattr(whole.get_submodule(inner), last, stack)
        describe(whole.get_submodule(inner), last, shard)
    for module in whole.modules():
        take_own_when_loaded(module)
    watch_optimizers()
    return whole


def computed(what: str, experts: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return what the experts of a rank make of their rows, the first counts[0] of which are the first one's.

    Linear layers and functions of one element at a time, one after another, take all rows at once, if nobody has hooks
    on them. Raises UsageError for a parameter that was put into them since they were made.
    """
    if type(experts) is not nn.Sequential or not all(type(layer) in _AT_ONCE for layer in experts):
        return _each_alone(what, experts, rows, counts)
    if has_hooks(experts) or any(map(has_hooks, experts)):
        return _each_alone(what, experts, rows, counts)
    for layer in experts:
        rows = (
            grouped_linear(rows, layer.weight, layer.bias, list(counts))
            if isinstance(layer, nn.Linear)
            else layer(rows)
        )
    return rows


def has_hooks(module: nn.Module) -> bool:
    """Return whether somebody wants to know of a module's own calls."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _each_alone(what: str, experts: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return what each expert makes of its rows, one after another; of none, too, so that all have gradients."""
    for inner, module in experts.named_modules():
        if new := [
            name for name, one in module._parameters.items() if one is not None and name not in shards_of(module)
        ]:
            name = f"{inner}.{new[0]}" if inner else new[0]
            raise UsageError(
                f"{what}: parameter {name} was put into the experts after they were made, and has no part for each of "
                "them: change the MLP before, and give expertize copy=True"
            )
    names, stacks = zip(*experts.named_parameters(), strict=True)
    results = []
    each = zip(*(stack.unbind(0) for stack in stacks), strict=True)
    for own, values in zip(rows.split(list(counts)), each, strict=True):
        results.append(torch.func.functional_call(experts, dict(zip(names, values, strict=True)), (own,)))
    return torch.cat(results)


_AT_ONCE = (
    nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish, nn.SELU, nn.Softplus,
    nn.Dropout, nn.Identity,
)  # fmt: skip


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let PyTorch's generator of the host begin anew inside, and go on as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _check(what: str, made: Sequence[nn.Module]) -> None:
    first: dict[str, Any] = {name: parameter.shape for name, parameter in made[0].named_parameters()}
    for name, _ in made[0].named_buffers():
        raise UsageError(
            f"{what}: an expert has a buffer, {name}: experts keep parameters alone, since each sees other tokens"
        )
    if not first:
        raise UsageError(f"{what}: an expert has no parameters")
    for number, other in enumerate(made):
        if {name: parameter.shape for name, parameter in other.named_parameters()} != first:
            raise UsageError(f"{what}: expert {number} of this rank has other parameters than the first one")
