"""Layers that can be divided: which class does that for a plain module and a style."""

from __future__ import annotations

from torch import nn

from commlib.errors import UsageError
from commlib.tensor.styles import Column, Replicate, Row, Style
from commlib_torch.tensor.linear import ColumnLinear, RowLinear

_LAYERS: dict[tuple[type[nn.Module], type[Style]], type[nn.Module]] = {
    (nn.Linear, Column): ColumnLinear,
    (nn.Linear, Row): RowLinear,
}


def find_layer(name: str, module: nn.Module, style: Style) -> type[nn.Module]:
    """Return the class that a module becomes. Raises UsageError if none is known."""
    if isinstance(style, Replicate) and not style.into_sharded:
        return type(module)
    for (plain, kind), layer in _LAYERS.items():
        if type(module) is plain and isinstance(style, kind):
            return layer
    able = sorted({plain.__name__ for plain, kind in _LAYERS if isinstance(style, kind)})
    raise UsageError(
        f"plan: {name} is a {type(module).__name__}, but {type(style).__name__} is for {', '.join(able) or 'no layer'}"
    )
