"""Containers: modules that only call their layers in sequence."""

from __future__ import annotations

from typing import Any

from torch import nn

from commlib_torch._tracer import hooks_of


def is_container(module: nn.Module) -> bool:
    """Return whether a module only calls its layers in sequence."""
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__ or hooks_of(module):
        return False
    for kind in (nn.Sequential, nn.ModuleList):
        if isinstance(module, kind):  # their forward iterates over the layers
            own: Any = type(module)
            return own.forward is kind.forward and own.__iter__ is kind.__iter__
    return False
