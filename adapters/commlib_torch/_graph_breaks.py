"""Graph breaks: functions that torch.compile must not trace, because communication cannot be part of a graph."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_WHY = (
    "commlib: communication cannot be part of a graph, so a model with sharded layers is compiled in several graphs: "
    "leave out fullgraph=True"
)

_follower: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
"""Returns the compiler's callback for frames of this thread, None if nothing is being compiled."""


def disable_compile(function: _F) -> _F:
    """Return a function at which graphs break. The compiler would otherwise trace into the core.

    The compiler is imported at its first use: this takes a second, which most programs can avoid. Outside of compiled
    code nothing is disabled, because disabling costs more than many of these functions.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules or _follower() is None:
            return function(*args, **kwargs)
        if "disabled" not in vars(called):
            vars(called)["disabled"] = torch.compiler.disable(function)
        return vars(called)["disabled"](*args, **kwargs)

    vars(called).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_WHY)  # names for the compiler's messages
    return cast(_F, called)


@contextmanager
def suspend_compile() -> Iterator[None]:
    """Run compiled models eagerly within the context: a graph cannot be inspected."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def unwrap_compiled(value: Any) -> Any:
    """Return the original of a compiled module; other modules unchanged.

    `_orig_mod` in other modules is not the compiler's.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while compiler is not None and isinstance(value, compiler.OptimizedModule):
        value = value._orig_mod
    return value


def leave_uncompiled(names: Sequence[str]) -> None:
    """Break graphs around all functions of these modules and packages.

    The setting takes effect when the compiler is imported, which takes a second: this function does not wait for it,
    and adds no cost to calls.
    """
    if "torch._dynamo" in sys.modules:
        _configure(names)
    else:
        sys.meta_path.insert(0, _CompilerFinder(names))


class _CompilerFinder:
    """An import finder that configures the compiler when it is imported."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None, as for an unknown module, except for the compiler."""
        if name != "torch._dynamo" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_configure(module: Any) -> None:
                load(module)
                _configure(self._names)

            loader.exec_module = load_and_configure
        return spec


def _configure(names: Sequence[str]) -> None:
    from torch._dynamo import trace_rules

    for name in names:
        trace_rules.add(name)
