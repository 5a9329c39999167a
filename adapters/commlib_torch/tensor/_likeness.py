"""Likeness of models of ranks: of what modules they consist, and how these are set."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from commlib.comparison.likeness import Likeness, is_function, is_plain, own_settings

_PYTORCHS, _OURS = "torch.nn.modules.", "commlib"
"""Modules of modules that say how they are set, and of those whose numbers may be a rank's."""


def likeness(model: nn.Module, *, closely: Container[nn.Module] = (), without: Container[nn.Module] = ()) -> Likeness:
    """Return of what a model consists. Nothing is called that is not PyTorch's.

    closely: modules of which attributes that are texts and integers are told, too. without: those of which nothing is.
    """
    found = Likeness()
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
        found.add(f"module {name}" if name else "the model", kind, {**settings, "frozen": frozen}, own)
    return found


def _settings(module: nn.Module) -> dict[str, Any]:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if is_plain(value) or is_function(value)}
