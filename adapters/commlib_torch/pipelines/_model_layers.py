"""Model layers: the layers of a model at the time of the split. A pipeline keeps them if the model replaces them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from commlib.errors import UsageError


class ModelLayers:
    """The children of modules that no stage contains: replacing one of them does not change the pipeline.

    The model is not kept alive: once it is dropped, it cannot be changed.
    """

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        within = {id(module) for part in parts for module in part.modules()}
        self._owners = [
            (weakref.ref(owner), path, {name: (weakref.ref(one), _kind(one)) for name, one in _layers(owner).items()})
            for path, owner in model.named_modules()
            if id(owner) not in within
        ]

    def check(self) -> None:
        """Raise UsageError if a layer was replaced, added or removed."""
        for get, path, children in self._owners:
            owner = get()
            if owner is None:
                continue
            now = _layers(owner)
            for name in {**children, **now}:
                get_before, before = children.get(name, (_no_layer, _kind(None)))
                after = now.get(name)
                # This rank has dropped layers of other stages.
                if get_before() is not after or (after is None and get_before is not _no_layer):
                    layer = f"{path}.{name}" if path else name
                    raise UsageError(
                        f"pipeline: layer {layer} of the model was {before} when it was split, and is {_kind(after)} "
                        "now: the stages still have the old layers. Change the layer's contents instead, or make a "
                        "new pipeline of the model"
                    )


def _no_layer() -> None:
    return None


def _layers(owner: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in owner._modules.items() if layer is not None}


def _kind(layer: nn.Module | None) -> str:
    return "nothing" if layer is None else f"a {type(layer).__name__}"
