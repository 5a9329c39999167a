"""Containers: which modules are nothing but their layers, one after another."""

from __future__ import annotations

from torch import nn

from commlib_torch._tracer import hooks_of


def is_container(module: nn.Module) -> bool:
    """Return whether calling a module is calling its layers one after another, and nothing else."""
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__ or hooks_of(module):
        return False
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList) and type(module).forward is nn.ModuleList.forward
