"""Experts of one rank as one module, whose parameters have the experts along their first dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.utils.stateless import _reparametrize_module

from commlib.errors import UsageError
from commlib.expert.placement import Placement
from commlib.expert.ranks import ExpertRanks, shard_for
from commlib.sharding.sharding import Nested, Sharding
from commlib.sharding.shards import part
from commlib.tensor_parallel.streams import fold
from commlib_torch._bridge import array_of, to_tensor
from commlib_torch._shards import describe, shards_of
from commlib_torch._tracer import hooks_of
from commlib_torch.expert._checkpoints import called_as, watch_checkpoints
from commlib_torch.expert._grouped import grouped_linear
from commlib_torch.expert._stepped import watch_gradients
from commlib_torch.tensor._dividing import take_own_when_loaded
from commlib_torch.tensor._initializing import watch_initialization
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
    watch_gradients()
    watch_initialization()
    watch_checkpoints()
    return whole


def computed(what: str, experts: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return what the experts of a rank make of their rows, the first counts[0] of which are the first one's.

    Linear layers and functions of one element at a time, one after another, take all rows at once, if calls of them
    are those of their classes. Raises UsageError for a parameter that was put into them since they were made.
    """
    if type(experts) is not nn.Sequential or not all(type(layer) in _AT_ONCE for layer in experts):
        return _each_alone(what, experts, rows, counts)
    if not (is_called_plainly(experts) and all(map(is_called_plainly, experts))):
        return _each_alone(what, experts, rows, counts)
    for layer in experts:
        rows = (
            grouped_linear(rows, layer.weight, layer.bias, list(counts))
            if isinstance(layer, nn.Linear)
            else layer(rows)
        )
    return rows


def is_called_plainly(module: nn.Module) -> bool:
    """Return whether a call of a module is the forward of its class: no hooks but our own, none put over it."""
    return "forward" not in vars(module) and not hooks_of(module)


def _each_alone(what: str, experts: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return what each expert makes of its rows, one after another; one without any has zeros as gradients."""
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

    def call(values: Sequence[Tensor], own: Tensor) -> Tensor:
        weights = dict(zip(names, values, strict=True))

        def with_weights(function: Callable[..., Any]) -> Any:
            with _reparametrize_module(experts, weights):
                return function()

        try:
            with called_as(with_weights):
                out = torch.func.functional_call(experts, weights, (own,))
        except Exception as error:
            error.add_note(f"This is an expert of {what}, called with {tuple(own.shape)}.")
            raise
        if not isinstance(out, Tensor) or out.shape != own.shape:
            made = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise UsageError(f"{what}: an expert made {made} of rows {tuple(own.shape)}, expected a tensor like them")
        return out

    each = zip(*(stack.unbind(0) for stack in stacks), strict=True)
    parts: tuple[Tensor, ...] = _Cut.apply(rows, list(counts))  # type: ignore[no-untyped-call]
    given = zip(each, parts, strict=True)
    results = [call(values, own) for values, own in given if len(own)]
    return torch.cat(results) if results else _of_none(call, rows, stacks)


def _of_none(call: Callable[[Sequence[Tensor], Tensor], Tensor], rows: Tensor, stacks: Sequence[Tensor]) -> Tensor:
    """Return no rows as an expert would make them, with zeros as gradients: a mean of none would have no number.

    It is called for their dtype, with none, or if it does not take these with one of zeros, and has no gradients.
    """
    values = [stack[0] for stack in stacks]
    with torch.no_grad():
        try:
            like = call(values, rows.detach())
        except Exception:
            like = call(values, rows.new_zeros(1, rows.shape[1]))
    found: Tensor = _Nothing.apply(rows, like, *stacks)  # type: ignore[no-untyped-call]
    return found


class _Cut(Function):
    """The rows of each expert, which it may write: views of one tensor have one version, and must not be written."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        rows = rows.contiguous()
        memory, width, first = rows.untyped_storage(), rows.shape[1], int(rows.storage_offset())
        places = accumulate((width * count for count in counts[:-1]), initial=first)
        return tuple(
            rows.new_empty(0).set_(memory, place, (count, width), (width, 1))
            for place, count in zip(places, counts, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat(gradients), None


class _Nothing(Function):
    """No rows, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, like: Tensor, *stacks: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *stacks)
        return like[:0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        rows, *stacks = map(torch.zeros_like, ctx.saved_tensors)
        return rows, None, *stacks


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
    check_tied(what, made[0])
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


def check_tied(what: str, module: nn.Module, model: nn.Module | None = None) -> None:
    """Raise UsageError for a parameter that two layers of a module have, or that it shares with others of its model.

    The stacks of experts are parameters of their own, so it would be one no more. A layer that a module calls twice
    stays one.
    """
    first: dict[int, str] = {}
    for name, parameter in (pair for layer in module.named_modules() for pair in _own_parameters(*layer)):
        if id(parameter) in first:
            raise UsageError(
                f"{what}: {first[id(parameter)]} and {name} are one parameter, tied: experts have each of their own: "
                "give each layer its own before, or hidden= for built-in MLPs"
            )
        first[id(parameter)] = name
    if model is None:
        return
    layers = list(model.named_modules(remove_duplicate=False))
    within = tuple(f"{name}." for name, layer in layers if layer is module)
    for outer, layer in layers:
        for name, parameter in _own_parameters(outer, layer):
            if id(parameter) in first and not name.startswith(within):
                raise UsageError(
                    f"{what}: {first[id(parameter)]} and {name} of the model are one parameter, tied: experts have "
                    "each of their own: give each layer its own before, or hidden= for built-in MLPs"
                )


def _own_parameters(name: str, layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a layer but not of those within it, by their names."""
    own = layer._parameters.items()
    return [(f"{name}.{inner}" if name else inner, one) for inner, one in own if one is not None]
