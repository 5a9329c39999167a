"""Numbers: integer attributes of modules, such as numbers of heads, which a plan with `PerRank` makes per-rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from commlib.tensor_parallel.run.number_proxy import unwrap_number
from commlib.tensor_parallel.run.rank_numbers import ModuleNumber, numbers_of
from commlib.tensor_parallel.styles import Style
from commlib_torch.tensor._leaves import is_leaf


def numbers_in(model: nn.Module) -> dict[str, ModuleNumber]:
    """Return the integers of modules that are not single layers, by names such as "h.0.attn.num_heads".

    Integers of a module's configuration have names such as "h.0.attn.config.num_heads": they change for that module
    only.
    """
    return {
        f"{path}.{number.own_name}" if path else number.own_name: number
        for path, module in model.named_modules(remove_duplicate=False)
        if not is_leaf(module)
        for number in (*_own_numbers(module), *(_configured(module) if path else ()))
    }


def _own_numbers(module: nn.Module) -> list[ModuleNumber]:
    return [ModuleNumber(module, name) for name, value in vars(module).items() if _is_number(name, value)]


def _configured(module: nn.Module) -> list[ModuleNumber]:
    """Return the integers in the configuration of a module that contains layers."""
    config = unwrap_number(vars(module).get("config"))
    if not hasattr(config, "__dict__") or isinstance(config, type) or not any(map(is_leaf, module.children())):
        return []
    return [ModuleNumber(module, "config", name) for name, value in vars(config).items() if _is_number(name, value)]


def _is_number(name: str, value: Any) -> bool:
    return type(value) is int and not name.startswith("_")


def styles_of_numbers(model: nn.Module) -> dict[str, Style]:
    """Return the styles of numbers that are already sharded."""
    named: Any = model.named_modules()
    return {f"{path}.{name}": style for path, module in named for name, style in numbers_of(module).items()}
