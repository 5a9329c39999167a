"""Optimizer state by parameter names, which can be loaded on any number of stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError

_OWN = ("params", "param_names")
"""Keys of a param group that list its parameters; the others are settings."""


def named_state(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """Return an optimizer's state with parameter names in place of their indices. Raises UsageError.

    A parameter with several names appears under all of them.
    """
    names = _names(named)
    order = _order(optimizer, names)
    plain = optimizer.state_dict()
    state = {name: value for number, value in plain["state"].items() for name in order[number]}
    groups = [
        {**_settings(group), "params": [name for number in group["params"] for name in order[number]]}
        for group in plain["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks. Groups with the same index are merged if all their settings are equal."""
    state: dict[str, Any] = {}
    groups: list[tuple[int, dict[str, Any]]] = []
    for own in states:
        state |= own["state"]
        for place, more in enumerate(own["param_groups"]):
            like = next((group for number, group in groups if number == place and _are_alike(group, more)), None)
            if like is None:
                groups.append((place, dict(more)))
            else:
                like["params"] = [*like["params"], *(name for name in more["params"] if name not in like["params"])]
    groups.sort(key=lambda item: item[0])
    return {"state": state, "param_groups": [group for _, group in groups]}


def load_named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], state: Mapping[str, Any]
) -> None:
    """Load a state from `merge_states` into an optimizer of some of the parameters; settings are per parameter.

    A parameter with several names has the state of the first name in the state. Raises UsageError if some are missing,
    or if parameters of one group had different settings.
    """
    names, saved = _names(named), {name: group for group in state["param_groups"] for name in group["params"]}
    order = _order(optimizer, names)
    if missing := [own[0] for own in order if own and not any(name in saved for name in own)]:
        raise UsageError(f"the optimizer state to load lacks {', '.join(missing)}")
    known = [next((name for name in own if name in saved), "") for own in order]  # a placeholder has no name
    groups = []
    for mine in optimizer.state_dict()["param_groups"]:
        first, *others = [known[number] for number in mine["params"] if known[number]] or [None]
        if odd := [name for name in others if not _are_alike(saved[name], saved[first])]:
            raise UsageError(
                f"the optimizer has {first} and {odd[0]} in one group, but the state to load has different settings "
                f"for them ({_difference(saved[first], saved[odd[0]])}): use the groups of the saved optimizer"
            )
        # A group without parameters cannot be matched.
        settings = {} if first is None else copy_state(_settings(saved[first]))
        groups.append({**mine, **settings})
    # Copy the saved tensors: optimizers update them in place.
    values = {n: copy_state(state["state"][name]) for n, name in enumerate(known) if name in state["state"]}
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _order(optimizer: torch.optim.Optimizer, names: Mapping[int, list[str]]) -> list[list[str]]:
    """Return the names of an optimizer's parameters in order; the placeholder of a rank without parameters has none.

    Raises UsageError for a parameter without a name.
    """
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in order:
        if id(parameter) not in names and (parameter.numel() or parameter.requires_grad):
            raise UsageError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not among the parameters "
                "of this model: use an optimizer of the model, and give all of its named_parameters()"
            )
    return [names.get(id(parameter), []) for parameter in order]


def _names(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        own = names.setdefault(id(parameter), [])
        if name not in own:
            own.append(name)
    return names


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN}


def _are_alike(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return not _difference(group, other)


def _difference(group: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe the difference between the settings of two groups; "" if there is none."""
    for key in {**_settings(group), **_settings(other)}:
        one, two = group.get(key), other.get(key)
        if isinstance(one, Tensor) or isinstance(two, Tensor):
            same = isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one, two)
        else:
            same = bool(one == two)
        if not same:
            return f"{key} {one} and {two}"
    return ""


def copy_state(value: Any) -> Any:
    """Return optimizer settings or states with copies of their tensors."""
    if isinstance(value, dict):
        return {key: copy_state(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copy_state, value))
    return value.clone() if isinstance(value, Tensor) else value
