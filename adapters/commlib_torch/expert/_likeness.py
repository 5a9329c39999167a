"""Likeness of MLPs of ranks: of what they consist, so that experts made of them are those of one mixture."""

from __future__ import annotations

from torch import nn

from commlib.comparison.agreement import lines_of
from commlib.comparison.likeness import is_plain
from commlib_torch.expert._kept import kept_of, told_of


def likeness(name: str, module: nn.Module, model: nn.Module) -> list[str]:
    """Return of what modules an MLP of a model consists, how they are set, and what they keep beside weights."""
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
    for where, key, value in kept_of(module.named_modules(prefix=name), model):
        if is_plain(value) and key.isidentifier() and not key.startswith("_"):
            continue  # it is warned of
        told = told_of(value)
        kind, _, more = told.kind.partition(" ")
        found.append(f"{where}: {kind} {key}: {more} {told.digest}")
    return found


def values_of(name: str, module: nn.Module) -> list[str]:
    """Return digests of the values of an MLP's parameters, but of those that have none yet."""
    found = []
    for inner, one in module.named_parameters():
        if not one.is_meta:
            found.append(f"values of {name}.{inner}: {told_of(one).digest}")
    return found
