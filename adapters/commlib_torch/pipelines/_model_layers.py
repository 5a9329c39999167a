"""Model layers: those that a model had when it was cut. A pipeline has these, whatever is put into their places."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from commlib.errors import UsageError


class ModelLayers:
    """The children of those modules of a model that no part of it has: of others each call sees what they have then.

    The model is not kept alive by that: where it is dropped, nobody can change it.
    """

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        within = {id(module) for part in parts for module in part.modules()}
        self._owners = [
            (weakref.ref(owner), path, {name: (weakref.ref(one), _kind(one)) for name, one in _layers(owner).items()})
            for path, owner in model.named_modules()
            if id(owner) not in within
        ]

    def check(self) -> None:
        """Raise UsageError if a layer was put into the place of another one, was added, or taken away."""
        for get, path, children in self._owners:
            owner = get()
            if owner is None:
                continue
            now = _layers(owner)
            for name in {**children, **now}:
                get_before, before = children.get(name, (_nothing, _kind(None)))
                after = now.get(name)
                # who has another stage's layer has let it go
                if get_before() is not after or (after is None and get_before is not _nothing):
                    layer = f"{path}.{name}" if path else name
                    raise UsageError(
                        f"pipeline: layer {layer} of the model was {before} when it was cut, and is "
                        f"{_kind(after)} now: the stages have the layers of then. Change what is within a layer, or "
                        "make the pipeline of the model as it is now"
                    )


def _nothing() -> None:
    return None


def _layers(owner: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in owner._modules.items() if layer is not None}


def _kind(layer: nn.Module | None) -> str:
    return "nothing" if layer is None else f"a {type(layer).__name__}"
