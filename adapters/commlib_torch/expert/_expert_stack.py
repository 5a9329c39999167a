"""Expert stacks: the experts of one rank as one module; the first dimension of its parameters is the expert."""

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
from commlib.expert.expert_ranks import ExpertRanks, shard_for
from commlib.expert.placement import ExpertPlacement
from commlib.sharding.sharding import NestedSharding, Sharding
from commlib.sharding.shards import part
from commlib.tensor_parallel.streams import fold
from commlib_torch._bridge import array_of, to_tensor
from commlib_torch._shards import describe, shards_of
from commlib_torch._tracer import hooks_of
from commlib_torch.expert._checkpoints import run_as_expert, watch_checkpoints
from commlib_torch.expert._gradient_checks import watch_gradients
from commlib_torch.expert._grouped_linear import grouped_linear
from commlib_torch.tensor._initializing import watch_initialization
from commlib_torch.tensor._sharding import take_own_when_loaded
from commlib_torch.tensor.optimizing import watch_optimizers


def stack_experts(
    what: str,
    make: Callable[[], nn.Module],
    seed: int,
    placement: ExpertPlacement,
    ranks: ExpertRanks,
    divided: Mapping[str, Sharding],
) -> nn.Module:
    """Return the experts of this rank, each made by `make` with PyTorch seeded for it.

    The values of an expert depend only on the seed and its number, not on the ranks. Its parameters are marked as
    shards of those of all experts. divided: the shardings of an expert's parameters, by name, among ranks of tensor
    parallelism, if there are any. Raises UsageError for modules that cannot be stacked.
    """
    experts = []
    for expert in placement.of_rank(ranks.axis.rank):
        with use_seed(fold(seed, expert)):
            experts.append(make())
    whole = experts[0]
    _check(what, experts)
    others = [dict(each.named_parameters()) for each in experts]
    for name, parameter in list(whole.named_parameters()):
        inner, _, last = name.rpartition(".")
        values = torch.stack([other[name].detach() for other in others])
        shard = shard_for((len(placement.owners), *parameter.shape), divided.get(name), ranks)
        if isinstance(shard.sharding, NestedSharding):
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


def run_experts(what: str, experts: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Run the experts of a rank on their rows; the first counts[0] rows are for the first expert.

    A sequence of linear layers and elementwise functions processes all rows at once, if their calls are those of their
    classes. Raises UsageError for a parameter that was added after the experts were made.
    """
    if type(experts) is not nn.Sequential or not all(type(layer) in _AT_ONCE for layer in experts):
        return _run_each(what, experts, rows, counts)
    if not (is_called_plainly(experts) and all(map(is_called_plainly, experts))):
        return _run_each(what, experts, rows, counts)
    for layer in experts:
        rows = (
            grouped_linear(rows, layer.weight, layer.bias, list(counts))
            if isinstance(layer, nn.Linear)
            else layer(rows)
        )
    return rows


def is_called_plainly(module: nn.Module) -> bool:
    """Return whether calling a module runs the forward of its class: no foreign hooks, no replaced forward."""
    return "forward" not in vars(module) and not hooks_of(module)


def _run_each(what: str, experts: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Run the experts one by one; an expert without rows gets zero gradients."""
    for inner, module in experts.named_modules():
        if new := [
            name for name, one in module._parameters.items() if one is not None and name not in shards_of(module)
        ]:
            name = f"{inner}.{new[0]}" if inner else new[0]
            raise UsageError(
                f"{what}: parameter {name} was added after the experts were made, and has no slice for each of them: "
                "change the MLP first, and pass copy=True to expertize"
            )
    names, stacks = zip(*experts.named_parameters(), strict=True)

    def call(values: Sequence[Tensor], own: Tensor) -> Tensor:
        weights = dict(zip(names, values, strict=True))

        def with_weights(function: Callable[..., Any]) -> Any:
            with _reparametrize_module(experts, weights):
                return function()

        try:
            with run_as_expert(with_weights):
                out = torch.func.functional_call(experts, weights, (own,))
        except Exception as error:
            error.add_note(f"This is an expert of {what}, called with {tuple(own.shape)}.")
            raise
        if not isinstance(out, Tensor) or out.shape != own.shape:
            form = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise UsageError(
                f"{what}: an expert returned {form} for rows {tuple(own.shape)}, expected a tensor of this shape"
            )
        return out

    each = zip(*(stack.unbind(0) for stack in stacks), strict=True)
    parts: tuple[Tensor, ...] = _SplitRows.apply(rows, list(counts))  # type: ignore[no-untyped-call]
    given = zip(each, parts, strict=True)
    results = [call(values, own) for values, own in given if len(own)]
    return torch.cat(results) if results else _run_without_rows(call, rows, stacks)


def _run_without_rows(
    call: Callable[[Sequence[Tensor], Tensor], Tensor], rows: Tensor, stacks: Sequence[Tensor]
) -> Tensor:
    """Return an expert's output for no rows, with zero gradients: a mean over none would be NaN.

    The expert runs on no rows to find the dtype, or on a row of zeros if it rejects that, without gradients.
    """
    values = [stack[0] for stack in stacks]
    with torch.no_grad():
        try:
            like = call(values, rows.detach())
        except Exception:
            like = call(values, rows.new_zeros(1, rows.shape[1]))
    output: Tensor = _NoRows.apply(rows, like, *stacks)  # type: ignore[no-untyped-call]
    return output


class _SplitRows(Function):
    """The rows of each expert, writable in place: views of one tensor would share one version counter."""

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


class _NoRows(Function):
    """An empty output with zero gradients."""

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
def use_seed(seed: int) -> Iterator[None]:
    """Seed PyTorch's host generator within the context, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _check(what: str, experts: Sequence[nn.Module]) -> None:
    check_tied(what, experts[0])
    first: dict[str, Any] = {name: parameter.shape for name, parameter in experts[0].named_parameters()}
    for name, _ in experts[0].named_buffers():
        raise UsageError(
            f"{what}: an expert has a buffer, {name}: experts may only have parameters, because each sees other tokens"
        )
    if not first:
        raise UsageError(f"{what}: an expert has no parameters")
    for number, other in enumerate(experts):
        if {name: parameter.shape for name, parameter in other.named_parameters()} != first:
            raise UsageError(f"{what}: expert {number} of this rank has other parameters than the first expert")


def check_tied(what: str, module: nn.Module, model: nn.Module | None = None) -> None:
    """Raise UsageError for a parameter shared by two layers of a module, or with other layers of its model.

    The stacks of experts are new parameters, so sharing would end. A layer that a module calls twice is allowed.
    """
    first: dict[int, str] = {}
    for name, parameter in (pair for layer in module.named_modules() for pair in _own_parameters(*layer)):
        if id(parameter) in first:
            raise UsageError(
                f"{what}: {first[id(parameter)]} and {name} are one tied parameter, and experts would each have "
                "separate ones: untie the layers first, or pass hidden= for built-in MLPs"
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
                    f"{what}: {first[id(parameter)]} and {name} of the model are one tied parameter, and experts "
                    "would each have separate ones: untie the layers first, or pass hidden= for built-in MLPs"
                )


def _own_parameters(name: str, layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a layer without those of its sublayers, by name."""
    own = layer._parameters.items()
    return [(f"{name}.{inner}" if name else inner, one) for inner, one in own if one is not None]
