"""Containers: which modules are nothing but their layers, one after another."""

from __future__ import annotations

from typing import Any

from torch import nn

from commlib_torch._tracer import hooks_of


def is_container(module: nn.Module) -> bool:
    """Return whether calling a module is calling its layers one after another, and nothing else."""
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__ or hooks_of(module):
        return False
    for kind in (nn.Sequential, nn.ModuleList):
        if isinstance(module, kind):  # whose forward goes through its layers by iter
            own: Any = type(module)
            return own.forward is kind.forward and own.__iter__ is kind.__iter__
    return False
