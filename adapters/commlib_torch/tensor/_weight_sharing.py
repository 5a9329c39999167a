"""Weight sharing: find the modules that share a weight and use it; a module may only hold it for another."""

from __future__ import annotations

import inspect
from types import CodeType

from torch import nn

from commlib_torch.tensor._leaves import is_leaf


def find_tied(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of modules that share a weight, except those whose forward does not mention it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for own, weight in module.named_parameters(recurse=False):
            if is_leaf(module) or _mentions(module, own):
                owners.setdefault(id(weight), []).append(name)
    return [tuple(names) for names in owners.values() if len(names) > 1]


def _mentions(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward, or a method that it calls, mentions an attribute of this name."""
    seen, waiting = set[str](), {"forward"}
    classes = [one for one in type(module).__mro__ if one not in (nn.Module, object)]
    while waiting:
        method = waiting.pop()
        seen.add(method)
        for function in [vars(one)[method] for one in classes if method in vars(one)]:
            function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is None and method == "forward":
                return True  # unknown
            names = set[str]() if code is None else _names_in(code)
            if name in names:
                return True
            waiting |= names - seen
    return False


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}.union(*inner)
