"""Numbers: integers that modules keep, such as heads, of which each rank has its part where a plan says `PerRank`."""

from __future__ import annotations

from typing import Any

from torch import nn

from commlib.tensor_parallel.run.own_numbers import whole_of
from commlib.tensor_parallel.run.per_rank import Number, numbers_of
from commlib.tensor_parallel.styles import Style
from commlib_torch.tensor._leaves import is_leaf


def numbers_in(model: nn.Module) -> dict[str, Number]:
    """Return the integers of modules that are no single layers, by names such as "h.0.attn.num_heads".

    Those of the configuration that a module has are called "h.0.attn.config.num_heads": they change for it alone.
    """
    return {
        f"{path}.{number.own_name}" if path else number.own_name: number
        for path, module in model.named_modules(remove_duplicate=False)
        if not is_leaf(module)
        for number in (*_own(module), *(_configured(module) if path else ()))
    }


def _own(module: nn.Module) -> list[Number]:
    return [Number(module, name) for name, value in vars(module).items() if _is_number(name, value)]


def _configured(module: nn.Module) -> list[Number]:
    """Return those of the configuration of a module that has layers itself."""
    config = whole_of(vars(module).get("config"))
    if not hasattr(config, "__dict__") or isinstance(config, type) or not any(map(is_leaf, module.children())):
        return []
    return [Number(module, "config", name) for name, value in vars(config).items() if _is_number(name, value)]


def _is_number(name: str, value: Any) -> bool:
    return type(value) is int and not name.startswith("_")


def styles_of_numbers(model: nn.Module) -> dict[str, Style]:
    """Return the styles of the numbers that are divided already."""
    named: Any = model.named_modules()
    return {f"{path}.{name}": style for path, module in named for name, style in numbers_of(module).items()}
