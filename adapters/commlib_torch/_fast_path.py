"""PyTorch's fused encoder layers: prevent their use of shards as full weights.

In evaluation, `nn.TransformerEncoderLayer` passes the weights of its layers to a fused kernel, which does not support
shards. A hook on one of these layers prevents this. `nn.TransformerEncoder` removes padding from its input for that
kernel, without checking for hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def keep_unfused(module: nn.Module) -> None:
    """Ensure that a layer is called, in every parent module."""
    if not _is_unfused(module):
        module.register_forward_pre_hook(_report_call)


def keep_padding(model: nn.Module) -> None:
    """Ensure that the encoders in a model call their layers with ordinary tensors if they contain sharded layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(map(_is_unfused, module.modules())):
            module.use_nested_tensor = False


def _is_unfused(module: nn.Module) -> bool:
    return _report_call in module._forward_pre_hooks.values()


def _report_call(module: nn.Module, args: Any) -> None:
    """Report a layer call outside of the model to the plan check; the hook's presence keeps the layer unfused."""
    if not torch.compiler.is_compiling():  # otherwise the compiler would make a program for each value of `inside`
        check = vars(module).get("plan_check")
        if check is not None and not check.inside:
            check.used(module, args)
