"""Numbers: integers that modules keep, such as heads, of which each rank has its part where a plan says `PerRank`."""

from __future__ import annotations

from typing import Any

from torch import nn

from commlib.functional.per_rank import Number, numbers_of
from commlib.tensor.styles import Style
from commlib_torch.tensor._leaves import is_leaf


def numbers_in(model: nn.Module) -> dict[str, Number]:
    """Return the integers of modules that are no single layers, by names such as "h.0.attn.num_heads"."""
    return {
        f"{path}.{name}" if path else name: Number(module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        if not is_leaf(module)
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }


def styles_of_numbers(model: nn.Module) -> dict[str, Style]:
    """Return the styles of the numbers that are divided already."""
    named: Any = model.named_modules()
    return {f"{path}.{name}": style for path, module in named for name, style in numbers_of(module).items()}
