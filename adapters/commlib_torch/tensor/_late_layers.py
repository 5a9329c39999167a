"""Late layers: wrappers and additions to sharded layers after the sharding, such as LoRA.

Their operations are unchecked, so the plan is checked again at the model's next calls.
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

from commlib.sharding.axis import ParallelAxis
from commlib_torch._shards import shard_of, shards_of


class LateLayerCheck(Protocol):
    """Checks the plan of a model that is sharded along an axis."""

    axis: ParallelAxis

    def note_late_layer(self, what: str) -> None:
        """Note a late layer, described in words."""


_CHECKS: weakref.WeakSet[Any] = weakref.WeakSet()
_WITHIN: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""The plan check of the model that contains a module."""


def report_late_layers(check: LateLayerCheck, model: nn.Module) -> None:
    """Report late layers of a model to a check from now on. Sharded layers have it as `plan_check`."""
    _CHECKS.add(check)
    for module in model.modules():
        _WITHIN[module] = weakref.ref(check)
    _watch()


@functools.cache
def _watch() -> None:
    register_module_module_registration_hook(_report_wrapper)
    register_module_parameter_registration_hook(_report_addition)


def _report_wrapper(module: nn.Module, name: str, layer: Any) -> None:
    check: LateLayerCheck | None = vars(layer).get("plan_check") if isinstance(layer, nn.Module) else None
    if check is not None:
        check.note_late_layer(f"the {type(module).__name__} around {layer.layer_name}")
    elif module in _WITHIN and (within := _WITHIN[module]()) is not None:
        within.note_late_layer(f"the {type(layer).__name__} that is {name} of a {type(module).__name__}")


def _report_addition(module: nn.Module, name: str, parameter: Any) -> None:
    own: LateLayerCheck | None = vars(module).get("plan_check")
    if parameter is None or name in shards_of(module):
        return
    if own is not None:
        if name not in vars(module)["_parameters"]:
            own.note_late_layer(f"{name} of {module.layer_name}")
    elif (shard := shard_of(parameter)) is not None:
        for check in list(_CHECKS):
            if check.axis is shard.axis:
                check.note_late_layer(f"the {type(module).__name__} with the {name} of a sharded layer")
