"""Model structure for comparison among ranks: the modules of a model and their settings."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from commlib.comparison.model_signature import ModelSignature, is_function, is_plain, own_settings

_PYTORCHS, _OURS = "torch.nn.modules.", "commlib"
"""Modules that describe their settings, and modules whose numbers may differ by rank."""


def structure_of(
    model: nn.Module, *, closely: Container[nn.Module] = (), without: Container[nn.Module] = ()
) -> ModelSignature:
    """Describe the structure of a model, without calling code outside of PyTorch.

    closely: modules whose string and integer attributes are included. without: excluded modules.
    """
    signature = ModelSignature()
    for name, module in model.named_modules():
        if module in without:
            continue
        kind, settings, own = type(module), dict[str, Any](), dict[str, Any]()
        if kind.__module__.startswith(_PYTORCHS):
            settings = _settings(module)
        elif not kind.__module__.startswith(_OURS):
            own = own_settings(vars(module), every=module in closely)
        if kind.extra_repr.__module__.startswith(_PYTORCHS) and not kind.__module__.startswith(_OURS):
            settings["settings"] = f"({module.extra_repr()})"
        frozen = [one for one, weight in module._parameters.items() if weight is not None and not weight.requires_grad]
        signature.add(f"module {name}" if name else "the model", kind, {**settings, "frozen": frozen}, own)
    return signature


def _settings(module: nn.Module) -> dict[str, Any]:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if is_plain(value) or is_function(value)}
