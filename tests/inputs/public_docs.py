"""Print the docstring and the parameters of each public name of the modules in the arguments, as JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def parameters(what: Any) -> list[str]:
    """Return the names of a function's or constructor's parameters, without self; none for built-in constructors."""
    try:
        return [name for name in inspect.signature(what).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        return []


def entry(what: Any) -> dict[str, Any]:
    """Return the facts that a test needs. home: the module that defines it."""
    return {
        "doc": inspect.getdoc(what) or "",
        "parameters": parameters(what),
        "kind": "class" if inspect.isclass(what) else "function",
        "home": getattr(what, "__module__", ""),
    }


def public(name: str) -> dict[str, Any]:
    """Return the entries of a module's, or a class's, public names."""
    try:
        holder = importlib.import_module(name)
        own = (each for each, value in vars(holder).items() if getattr(value, "__module__", "") == name)
        names = getattr(holder, "__all__", None) or [each for each in own if not each.startswith("_")]
        entries = {each: getattr(holder, each) for each in names}
    except ImportError:
        module, _, kind = name.rpartition(".")
        holder = getattr(importlib.import_module(module), kind)
        entries = {each: value for each, value in vars(holder).items() if not each.startswith("_")}
    return {
        f"{name}.{each}": entry(value)
        for each, value in sorted(entries.items())
        if (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("commlib")
    }


def once(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries except those of an object that also has an earlier name."""
    first: dict[tuple[str, str], str] = {}
    for name, what in entries.items():
        first.setdefault((what["home"], what["doc"]), name)
    return {name: what for name, what in entries.items() if first[what["home"], what["doc"]] == name}


if __name__ == "__main__":
    print(json.dumps(once({key: value for name in sys.argv[1:] for key, value in public(name).items()})))
