"""Structure of MLPs for comparison among ranks: experts made from them must belong to one mixture."""

from __future__ import annotations

from torch import nn

from commlib.comparison.agreement import lines_of
from commlib.comparison.model_signature import is_plain
from commlib_torch.expert._attribute_state import attribute_state_of, fingerprint_of


def structure_of(name: str, module: nn.Module, model: nn.Module) -> list[str]:
    """Describe an MLP of a model: its modules, their settings, and attribute state."""
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
    for where, key, value in attribute_state_of(module.named_modules(prefix=name), model):
        if is_plain(value) and key.isidentifier() and not key.startswith("_"):
            continue  # a warning covers it
        told = fingerprint_of(value)
        kind, _, more = told.kind.partition(" ")
        found.append(f"{where}: {kind} {key}: {more} {told.digest}")
    return found


def values_of(name: str, module: nn.Module) -> list[str]:
    """Return digests of an MLP's parameters, except those without values."""
    found = []
    for inner, one in module.named_parameters():
        if not one.is_meta:
            found.append(f"values of {name}.{inner}: {fingerprint_of(one).digest}")
    return found
