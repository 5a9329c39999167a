"""State by the names and shapes of the whole model: gathered from any number of ranks, loaded on any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.sharding.shards import Shard
from commlib_torch._bridge import array_of, on_host, to_tensor
from commlib_torch._optimizer_state import copied, load_named, named_state
from commlib_torch._shards import renew_all, shard_of

Named = Iterable[tuple[str, nn.Parameter]]


def gather_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model as that of the model that is whole: its names, its shapes, on every rank.

    Collective over the axes that its parameters are divided over. Values are copies, on the host where they are put
    together. `load_state_dict` takes it, of a plain model and of one that is divided among any number of ranks.
    """
    renew_all(model)
    found: dict[str, Any] = {}
    wholes: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        shard = shard_of(value) if isinstance(value, Tensor) else None
        if shard is not None and id(value) not in wholes:  # tied weights have several names
            wholes[id(value)] = _whole(value, shard)
        found[name] = wholes[id(value)] if shard is not None else _copied(value)
    return found


def gather_optimizer_state(optimizer: torch.optim.Optimizer, named_parameters: Named) -> dict[str, Any]:
    """Return an optimizer's state by the names of parameters, whole, on every rank.

    named_parameters: such as `model.named_parameters()`. Collective over the axes that parameters are divided over.
    Values are copies.
    Raises MismatchError unless ranks keep the same for the same parameters, UsageError for state of a divided parameter
    that is neither one number nor of its shape: such an optimizer looks at whole weights, and was wrong already.
    """
    named = _checked("gather_optimizer_state(optimizer, named_parameters)", optimizer, named_parameters)
    state = named_state(optimizer, named)
    _check_alike(state["state"], named)
    groups = copied(state["param_groups"])
    return _by_parameter({**state, "param_groups": groups}, named, _whole_state, copied)


def load_optimizer_state(optimizer: torch.optim.Optimizer, named_parameters: Named, state: Mapping[str, Any]) -> None:
    """Load what `gather_optimizer_state` returned, on any number of ranks: each takes its parts. Not collective.

    Raises UsageError for arguments in another order, for what lacks some parameters, or has other settings for them.
    """
    call = "load_optimizer_state(optimizer, named_parameters, state)"
    named = _checked(call, optimizer, named_parameters)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise UsageError(f"{call}: state is {_said(state)}, expected what gather_optimizer_state returned")
    load_named(optimizer, named, _by_parameter(state, named, _own))


def _checked(call: str, optimizer: Any, named: Any) -> list[tuple[str, nn.Parameter]]:
    """Return named parameters as a list. Raises UsageError if they, or the optimizer, are something else."""
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"{call}: optimizer is {_said(optimizer)}, expected an optimizer")
    found: list[Any] = list(named) if isinstance(named, Iterable) and not isinstance(named, Mapping) else [None]
    if not all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor) for one in found):
        expected = "expected pairs of names and parameters, such as model.named_parameters()"
        raise UsageError(f"{call}: named_parameters is {_said(named)}, {expected}")
    return found


def _said(value: Any) -> str:
    return f"a {type(value).__name__}"


def _check_alike(state: Mapping[str, Mapping[str, Any]], named: list[tuple[str, nn.Parameter]]) -> None:
    """Compare what ranks keep for divided parameters, along each axis: another value would be put into its place."""
    lines: dict[int, list[str]] = {}
    axes = {}
    for name, parameter in sorted(named, key=lambda one: one[0]):
        if (shard := shard_of(parameter)) is not None:
            axes[id(shard.axis.comm)] = shard.axis.comm
            kept = (key for key, value in state.get(name, {}).items() if isinstance(value, Tensor) and value.dim() > 0)
            lines.setdefault(id(shard.axis.comm), []).append(
                f"{name}: {', '.join(sorted(map(str, kept))) or 'nothing'}"
            )
    for key, comm in axes.items():
        check_agreement(comm, "gather_optimizer_state", lines[key])


def _by_parameter(
    state: Mapping[str, Any],
    named: Iterable[tuple[str, nn.Parameter]],
    change: Callable[[str, Tensor, Shard], Tensor],
    keep: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Any]:
    """Return a state in which what is kept for divided parameters has changed. keep: what becomes of all else."""
    shards = {name: shard for name, parameter in named if (shard := shard_of(parameter)) is not None}
    values: dict[str, Any] = {}
    changed: dict[int, Any] = {}  # tied weights have several names
    for name, kept in sorted(state["state"].items()):  # in one order on all ranks, whatever came first on each
        if id(kept) not in changed:
            divided = [key for key in sorted(kept, key=str) if _is_divided(kept[key], name, shards)]
            parts = {key: change(f"{key} of {name}", kept[key], shards[name]) for key in divided}
            changed[id(kept)] = {key: parts[key] if key in parts else keep(one) for key, one in kept.items()}
        values[name] = changed[id(kept)]
    return {**state, "state": {name: values[name] for name in state["state"]}}


def _is_divided(value: Any, name: str, shards: Mapping[str, Shard]) -> bool:
    return name in shards and isinstance(value, Tensor) and value.dim() > 0


def _whole_state(what: str, value: Tensor, shard: Shard) -> Tensor:
    expected = shard.sharding.local(shard.axis.rank, shard.axis.size)
    if tuple(value.shape) != expected:
        raise UsageError(
            f"{what} has shape {tuple(value.shape)}, expected {expected}, that of the parameter's part: this optimizer "
            "keeps something else than a number for each weight, which cannot be put together"
        )
    return _whole(value, shard)


def _whole(value: Tensor, shard: Shard) -> Tensor:
    return to_tensor(shard.whole(array_of(on_host(value))))


def _own(name: str, value: Any, shard: Shard) -> Tensor:
    if tuple(value.shape) != shard.sharding.shape:
        raise UsageError(
            f"{name} has shape {tuple(value.shape)}, expected {shard.sharding.shape}, that of the model that is whole"
        )
    return to_tensor(shard.own(array_of(on_host(value))))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
