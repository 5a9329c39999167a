"""Optimizer states of experts, by the names in files: see `commlib.expert.checkpoint`."""

from __future__ import annotations

import inspect
import numbers
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.checkpoint import FIRST, LARGEST, MOMENTUM, SECOND, STEP, UPDATE, momentum, optimizer_names
from commlib_torch._bridge import array_of, to_host, to_tensor
from commlib_torch._shards import shard_of

_COMMON: tuple[tuple[Any, Mapping[str, str]], ...] = (
    ((Adam, AdamW), {"exp_avg": FIRST, "exp_avg_sq": SECOND, "max_exp_avg_sq": LARGEST}),
    (SGD, {"momentum_buffer": MOMENTUM}),
)


class OptimizerStates:
    """An optimizer's states of weights. verb: the caller, for errors."""

    def __init__(self, verb: str, optimizer: Optimizer | None) -> None:
        self._verb, self._optimizer = verb, optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = {id(parameter): group for group in groups for parameter in group["params"]}
        self._kind = next((one for one in type(optimizer).__mro__ if not one.__module__.startswith("commlib")), object)
        self._common = next((names for kinds, names in _COMMON if isinstance(optimizer, kinds)), {})

    @property
    def name(self) -> str:
        """The class of the optimizer, for errors."""
        return self._kind.__name__

    def of(self, what: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter by name. what: the parameter's name.

        Raises UsageError for a state that is neither per element nor one number for the parameter.
        """
        states = {}
        for key, value in self._state(parameter).items():
            if value is None:
                continue
            if not isinstance(value, Tensor | numbers.Real) or not (is_number(value) or is_stack(value, parameter)):
                raise UsageError(
                    f"{self._verb}: the {self.name} state {key} of {what} is {_describe(value)}, and the parameter has "
                    f"shape {list(parameter.shape)}: it cannot be assigned to experts: do not pass the optimizer"
                )
            states[self._named(key)] = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return states

    def keeps(self, parameter: Tensor, file: Collection[str]) -> Collection[str]:
        """Return the names of a parameter's states, without its step. file: the names in a file."""
        state = self._state(parameter)
        if id(parameter) not in self._groups:
            names: set[str] = set()
        elif not state and not file:
            return ()  # neither has made a step
        elif (trial := self._trial(parameter)) is not None:
            names = {self._named(key) for key, value in trial.items() if value is not None}
        else:
            mine = {MOMENTUM if name == UPDATE else name for name in file}
            mine = {name for name in mine if name in self._common.values() or name.startswith(self._named(""))}
            names = mine | {self._named(key) for key, value in state.items() if value is not None}
        return names - {STEP}

    def read(self, layer: Mapping[str, Array], what: str, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's states from a file, in the optimizer's form."""
        names = self.keeps(parameter, optimizer_names(layer, what))
        if not names:
            return {}
        group, like = self._groups[id(parameter)], self._trial(parameter) or self._state(parameter)
        states: dict[str, Any] = {}
        for name in sorted(names):  # ranks gather states in this order
            key = next((key for key, common in self._common.items() if common == name), name.rpartition(".")[2])
            array = momentum(layer, what, name, float(group["lr"])) if name == MOMENTUM else layer[f"{what}/{name}"]
            states[key] = _to_state(array, parameter, like.get(key))
        if f"{what}/{STEP}" in layer and (STEP in like or not like):
            states[STEP] = _to_state(layer[f"{what}/{STEP}"], parameter, like.get(STEP))
        return states

    def put(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's optimizer states."""
        if self._optimizer is not None and (state or self._state(parameter)):
            self._optimizer.state[parameter] = state

    def _state(self, parameter: Tensor) -> Mapping[str, Any]:
        return {} if self._optimizer is None else self._optimizer.state.get(parameter, {})

    def _named(self, key: str) -> str:
        return STEP if key == STEP else self._common.get(key, f"torch.{self.name}.{key}")

    def _trial(self, parameter: Tensor) -> Mapping[str, Any] | None:
        """Return the states of one of PyTorch's optimizers after a step of such a parameter; None if unknown."""
        if not self._kind.__module__.startswith("torch.optim."):
            return None
        alone = nn.Parameter(torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
        alone.grad = torch.zeros_like(alone)
        other: Any = object.__new__(self._kind)
        vars(other).update(vars(self._optimizer))
        other.param_groups = [{**self._groups[id(parameter)], "params": [alone]}]
        other.state = defaultdict(dict)
        other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            with torch.no_grad():
                inspect.unwrap(self._kind.step)(other)  # type: ignore[attr-defined]  # past what watches all steps
        except Exception:  # for example if gradients must be sparse
            return None
        return {key: value for key, value in other.state[alone].items() if value is not None}


def is_stack(value: Any, parameter: Tensor) -> bool:
    """Return whether an optimizer state has one element per element of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


def is_number(value: Any) -> bool:
    """Return whether an optimizer state is one number."""
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.dim() == 0)


def gather_full(value: Tensor, parameter: Tensor) -> Array:
    """Gather the full parameter, or its full state. Collective, except for numbers."""
    shard, array = shard_of(parameter), array_of(to_host(value.detach()))
    return array.copy() if shard is None or not is_stack(value, parameter) else shard.whole(array)


def take_shard(array: Array, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a full parameter or state."""
    shard = shard_of(parameter)
    return to_tensor(array.copy() if shard is None else shard.own(array))


def _to_state(array: Array, parameter: Tensor, like: Any) -> Any:
    if array.ndim == 0 and parameter.dim() > 0:
        if isinstance(like, Tensor):
            return torch.tensor(array.item(), dtype=like.dtype, device=like.device)
        is_plain = like is not None or array.dtype.name in ("int64", "float64")  # the form of Python's numbers in files
        return array.item() if is_plain else to_tensor(array.copy())
    shard = take_shard(array, parameter)
    kind = like.dtype if isinstance(like, Tensor) else parameter.dtype if shard.is_floating_point() else shard.dtype
    return shard.to(device=parameter.device, dtype=kind)


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
