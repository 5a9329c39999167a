"""Likeness of MLPs of ranks: of what they consist, so that experts made of them are those of one mixture."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from commlib.functional.agreement import lines_of


def likeness(name: str, module: nn.Module) -> list[str]:
    """Return of what modules an MLP consists, and how they are set: functions, numbers with fractions, tensors, too."""
    found = []
    for inner, layer in module.named_modules():
        where = f"{name}.{inner}" if inner else name
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        settings = {
            key: value
            for key, value in vars(layer).items()
            if not key.startswith("_") and (isinstance(value, bool | float) or callable(value))
        }
        frozen = [key for key, one in layer._parameters.items() if one is not None and not one.requires_grad]
        found += [f"{where}: {kind}({layer.extra_repr()})", *lines_of(where, settings), f"{where}: frozen {frozen}"]
        tensors = {key: value for key, value in vars(layer).items() if isinstance(value, Tensor) and not value.is_meta}
        found += [f"{where}: tensor {key}: {_digest(value)}" for key, value in tensors.items()]
    return found


def values_of(name: str, module: nn.Module) -> list[str]:
    """Return digests of the values of an MLP's parameters, but of those that have none yet."""
    found = []
    for inner, one in module.named_parameters():
        if not one.is_meta:
            found.append(f"values of {name}.{inner}: {_digest(one)}")
    return found


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]
