"""State with the names and shapes of the unsharded model: gathered from any number of ranks, loaded on any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.sharding.shards import Shard
from commlib_torch._bridge import array_of, to_host, to_tensor
from commlib_torch._optimizer_state import copy_state, load_named, named_state
from commlib_torch._shards import renew_all, shard_of
from commlib_torch.pipelines._stage_module import StageModule

Named = Iterable[tuple[str, nn.Parameter]]


def gather_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of the unsharded model, with its names and shapes, on every rank.

    Collective over the axes along which its parameters are sharded. Values are copies; gathered ones are on the host.
    `load_state_dict` loads it, in a plain model and in one sharded over any number of ranks.

    Args:
        model: A model with or without sharded layers and experts, or a pipeline.
    """
    if isinstance(model, StageModule):  # its own state is that of this rank's stages
        pipeline: Any = model
        whole: dict[str, Any] = pipeline.gather_state_dict()
        return whole
    return gather_shards(model)


def gather_shards(model: nn.Module) -> dict[str, Any]:
    """Return the unsharded state of a model, or of this rank's stages of one."""
    renew_all(model)
    gathered: dict[str, Any] = {}
    wholes: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        shard = shard_of(value) if isinstance(value, Tensor) else None
        if shard is not None and id(value) not in wholes:  # tied weights have several names
            wholes[id(value)] = _gather_full(value, shard)
        gathered[name] = wholes[id(value)] if shard is not None else _copy_values(value)
    return gathered


def gather_optimizer_state(optimizer: torch.optim.Optimizer, named_parameters: Named) -> dict[str, Any]:
    """Return an optimizer's full state by parameter names, on every rank.

    Collective over the axes along which parameters are sharded. Values are copies.

    Args:
        optimizer: The optimizer.
        named_parameters: Such as `model.named_parameters()`.

    Raises:
        MismatchError: Unless ranks have the same kinds of state for the same parameters.
        UsageError: For state of a sharded parameter that is neither one number nor of its shape: such an optimizer
            needs full weights, and has been wrong.
    """
    named = _check_arguments("gather_optimizer_state(optimizer, named_parameters)", optimizer, named_parameters)
    state = named_state(optimizer, named)
    _check_alike(state["state"], named)
    groups = copy_state(state["param_groups"])
    return _map_parameters({**state, "param_groups": groups}, named, _whole_state, copy_state)


def load_optimizer_state(optimizer: torch.optim.Optimizer, named_parameters: Named, state: Mapping[str, Any]) -> None:
    """Load the result of `gather_optimizer_state` on any number of ranks: each takes its shards. Not collective.

    Args:
        optimizer: The optimizer.
        named_parameters: Such as `model.named_parameters()`.
        state: The result of `gather_optimizer_state`.

    Raises:
        UsageError: For arguments in the wrong order, and for a state with missing parameters or other settings.
    """
    call = "load_optimizer_state(optimizer, named_parameters, state)"
    named = _check_arguments(call, optimizer, named_parameters)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise UsageError(f"{call}: state is {_describe(state)}, expected the result of gather_optimizer_state")
    load_named(optimizer, named, _map_parameters(state, named, _take_shard))


def _check_arguments(call: str, optimizer: Any, named: Any) -> list[tuple[str, nn.Parameter]]:
    """Return named parameters as a list. Raises UsageError if they, or the optimizer, have another type."""
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"{call}: optimizer is {_describe(optimizer)}, expected an optimizer")
    pairs: list[Any] = list(named) if isinstance(named, Iterable) and not isinstance(named, Mapping) else [None]
    if not all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor) for one in pairs):
        expected = "expected pairs of names and parameters, such as model.named_parameters()"
        raise UsageError(f"{call}: named_parameters is {_describe(named)}, {expected}")
    return pairs


def _describe(value: Any) -> str:
    return f"a {type(value).__name__}"


def _check_alike(state: Mapping[str, Mapping[str, Any]], named: list[tuple[str, nn.Parameter]]) -> None:
    """Compare the optimizer state of sharded parameters along each axis: different state could not be joined."""
    lines: dict[int, list[str]] = {}
    axes = {}
    for name, parameter in sorted(named, key=lambda one: one[0]):
        if (shard := shard_of(parameter)) is not None:
            axes[id(shard.axis.comm)] = shard.axis.comm
            keys = (key for key, value in state.get(name, {}).items() if isinstance(value, Tensor) and value.dim() > 0)
            lines.setdefault(id(shard.axis.comm), []).append(
                f"{name}: {', '.join(sorted(map(str, keys))) or 'nothing'}"
            )
    for key, comm in axes.items():
        check_agreement(comm, "gather_optimizer_state", lines[key])


def _map_parameters(
    state: Mapping[str, Any],
    named: Iterable[tuple[str, nn.Parameter]],
    change: Callable[[str, Tensor, Shard], Tensor],
    keep: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Any]:
    """Return a state with the entries of sharded parameters changed. keep: converts all other entries."""
    shards = {name: shard for name, parameter in named if (shard := shard_of(parameter)) is not None}
    values: dict[str, Any] = {}
    changed: dict[int, Any] = {}  # tied weights have several names
    for name, slots in sorted(state["state"].items()):  # in the same order on all ranks, independent of insertion order
        if id(slots) not in changed:
            divided = [key for key in sorted(slots, key=str) if _is_divided(slots[key], name, shards)]
            parts = {key: change(f"{key} of {name}", slots[key], shards[name]) for key in divided}
            changed[id(slots)] = {key: parts[key] if key in parts else keep(one) for key, one in slots.items()}
        values[name] = changed[id(slots)]
    return {**state, "state": {name: values[name] for name in state["state"]}}


def _is_divided(value: Any, name: str, shards: Mapping[str, Shard]) -> bool:
    return name in shards and isinstance(value, Tensor) and value.dim() > 0


def _whole_state(what: str, value: Tensor, shard: Shard) -> Tensor:
    expected = shard.sharding.local(shard.axis.rank, shard.axis.size)
    if tuple(value.shape) != expected:
        raise UsageError(
            f"{what} has shape {tuple(value.shape)}, expected {expected}, the shape of the parameter's shard: this "
            "optimizer's state is not one number per weight, and cannot be gathered"
        )
    return _gather_full(value, shard)


def _gather_full(value: Tensor, shard: Shard) -> Tensor:
    return to_tensor(shard.whole(array_of(to_host(value))))


def _take_shard(name: str, value: Any, shard: Shard) -> Tensor:
    if tuple(value.shape) != shard.sharding.shape:
        raise UsageError(
            f"{name} has shape {tuple(value.shape)}, expected {shard.sharding.shape}, the shape in the unsharded model"
        )
    return to_tensor(shard.own(array_of(to_host(value))))


def _copy_values(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
