"""Options: one line for each property of layers and a loss that must be equal on all ranks, except weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from commlib.comparison.agreement import describe

_OF_RANK = re.compile(
    r"(?<=\bcuda):\d+|(?<=\bxpu):\d+|, index=\d+(?=\))"
    r"|(?<=<Axis )[^>]*: rank \d+ (?=of)|(?<=ProcessSet\()[^)]*"
)
"""Values that differ among ranks: the index of a device, the group of an axis, a process set."""


def options_of_stages(parts: Sequence[nn.Module]) -> list[str]:
    """Return a line for each layer of the stages, such as "layer 3 of stage 0: Dropout(p=0.1)", and each operation."""
    return [line for stage, part in enumerate(parts) for line in _of_stage(stage, part)]


def options_of_loss(loss: Callable[..., Any] | None) -> list[str]:
    """Describe a loss: a function's name, or a module's type and options."""
    while isinstance(loss, partial):
        loss = loss.func
    if isinstance(loss, nn.Module):
        modules = loss.named_modules()
        return [f"{f'layer {name} of the ' if name else ''}loss: {_of_layer(layer)}" for name, layer in modules]
    return [f"loss: {describe(loss)}"]


def _of_stage(stage: int, part: nn.Module) -> Iterator[str]:
    for name, layer in part.named_modules(remove_duplicate=False):
        if name:
            yield f"layer {name} of stage {stage}: {_of_layer(layer)}"
    for operation in vars(part).get("_commlib", ())[3:]:  # of a traced model
        yield f"stage {stage}: {operation}"


def options_of(graph: fx.Graph) -> list[str]:
    """Return a line for each operation of a graph, such as "dropout: torch.nn.functional.dropout(relu, 0.1)"."""
    return [
        f"{node.name}: {_text(node.target)}({', '.join(map(_text, (*node.args, *node.kwargs.items())))})"
        for node in graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
    ]


def _of_layer(layer: nn.Module) -> str:
    options = {name: getattr(layer, name, None) for name in getattr(layer, "__constants__", ())}
    simple = [f"{name}={value!r}" for name, value in options.items() if isinstance(value, bool | int | float | str)]
    text = _text(layer.extra_repr())
    more = [one for one in simple if one not in text]
    return f"{type(layer).__name__}({', '.join(filter(None, (text, *more)))})"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else describe(value)
    return type(value).__name__ if " at 0x" in text else _OF_RANK.sub("", text)
