"""Put later: what comes around a divided layer, or onto it, when the model is divided already, as LoRA does.

Nobody has looked at what that computes, so the plan is checked again, at the model's next calls.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from commlib.sharding.axis import Axis
from commlib_torch._shards import shard_of, shards_of


class Check(Protocol):
    """What checks the plan of a model that is divided along an axis."""

    axis: Axis

    def came_later(self, what: str) -> None:
        """Hear of what came, in words."""


_CHECKS: weakref.WeakSet[Any] = weakref.WeakSet()
_WITHIN: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Who checks the model in which a module is."""


def tell(check: Check, model: nn.Module) -> None:
    """Tell a check of what comes later into a model, from now on. Divided layers have it as `plan_check`."""
    _CHECKS.add(check)
    for module in model.modules():
        _WITHIN[module] = weakref.ref(check)
    _watch()


@functools.cache
def _watch() -> None:
    register_module_module_registration_hook(_put_around)
    register_module_parameter_registration_hook(_put_onto)


def _put_around(module: nn.Module, name: str, layer: Any) -> None:
    check: Check | None = vars(layer).get("plan_check") if isinstance(layer, nn.Module) else None
    if check is not None:
        check.came_later(f"the {type(module).__name__} around {layer.layer_name}")
    elif module in _WITHIN and (within := _WITHIN[module]()) is not None:
        within.came_later(f"the {type(layer).__name__} that is {name} of a {type(module).__name__}")


def _put_onto(module: nn.Module, name: str, parameter: Any) -> None:
    own: Check | None = vars(module).get("plan_check")
    if parameter is None or name in shards_of(module):
        return
    if own is not None:
        if name not in vars(module)["_parameters"]:
            own.came_later(f"{name} of {module.layer_name}")
    elif (shard := shard_of(parameter)) is not None:
        for check in list(_CHECKS):
            if check.axis is shard.axis:
                check.came_later(f"the {type(module).__name__} with the {name} of a divided layer")
