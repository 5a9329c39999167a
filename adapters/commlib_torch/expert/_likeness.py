"""Likeness of MLPs of ranks: of what they consist, so that experts made of them are those of one mixture."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from commlib.functional.agreement import lines_of


def likeness(name: str, module: nn.Module) -> list[str]:
    """Return of what modules an MLP consists, and how they are set: functions and numbers with fractions, too."""
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
    return found


@torch.no_grad()
def values_of(name: str, module: nn.Module) -> list[str]:
    """Return digests of the values of an MLP's parameters, but of those that have none yet."""
    found = []
    for inner, one in module.named_parameters():
        if not one.is_meta:
            values = one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            found.append(f"values of {name}.{inner}: {hashlib.sha256(values.tobytes()).hexdigest()[:16]}")
    return found
