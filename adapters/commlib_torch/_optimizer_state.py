"""Optimizer state by the names of parameters: so that it can be loaded on any number of stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError


def named_state(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """Return an optimizer's state with names of parameters in place of their numbers. Raises UsageError."""
    names = {id(parameter): name for name, parameter in named}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := [tuple(parameter.shape) for parameter in order if id(parameter) not in names]:
        raise UsageError(f"the optimizer has a parameter of shape {unknown[0]} that is none of this pipeline's")
    plain = optimizer.state_dict()
    state = {names[id(order[number])]: value for number, value in plain["state"].items()}
    groups = [
        {**group, "params": [names[id(order[number])] for number in group["params"]]} for group in plain["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def merged(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of all ranks as one. The settings of a group are those of the first rank."""
    first, *others = states
    state, groups = dict(first["state"]), [dict(group) for group in first["param_groups"]]
    for other in others:
        state |= other["state"]
        for group, more in zip(groups, other["param_groups"], strict=True):
            group["params"] = [*group["params"], *(name for name in more["params"] if name not in group["params"])]
    return {"state": state, "param_groups": groups}


def load_named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], state: Mapping[str, Any]
) -> None:
    """Load what `merged` made into an optimizer of some of the parameters. Raises UsageError if some are missing."""
    names = {id(parameter): name for name, parameter in named}
    own = optimizer.state_dict()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    known = {name for group in state["param_groups"] for name in group["params"]}
    if missing := [name for name in order if name not in known]:
        raise UsageError(f"the state of an optimizer that is to be loaded lacks {', '.join(missing)}")
    groups = [
        {**saved, "params": mine["params"]}
        for mine, saved in zip(own["param_groups"], state["param_groups"], strict=True)
    ]
    # What is loaded must not be the memory that was saved: optimizers update it in place.
    values = {n: _copied(state["state"][name]) for n, name in enumerate(order) if name in state["state"]}
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
