"""PyTorch's fused encoder layers: keep them from taking shards for whole weights.

In evaluation `nn.TransformerEncoderLayer` gives the weights of its layers to one fused kernel, which knows nothing of
shards. It does not where a layer within it has a hook; `nn.TransformerEncoder` takes padding out of its input for that
kernel, and asks nobody.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def keep_unfused(module: nn.Module) -> None:
    """Let a layer be called, whatever it stands in."""
    if not _is_unfused(module):
        module.register_forward_pre_hook(_called)


def keep_padding(model: nn.Module) -> None:
    """Let the encoders within a model call their layers with ordinary tensors, if something there is divided."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(map(_is_unfused, module.modules())):
            module.use_nested_tensor = False


def _is_unfused(module: nn.Module) -> bool:
    return _called in module._forward_pre_hooks.values()


def _called(module: nn.Module, args: Any) -> None:
    """Tell the plan's check if a layer is called outside of the model; that the hook is there keeps it unfused."""
    if not torch.compiler.is_compiling():  # else there would be a program for each value of `inside`
        check = vars(module).get("plan_check")
        if check is not None and not check.inside:
            check.used(module, args)
