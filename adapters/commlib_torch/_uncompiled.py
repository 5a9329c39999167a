"""Functions that torch.compile calls as they are: what travels between ranks is no part of a graph."""

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
    "commlib: what travels between ranks is no part of a graph, so a model with divided layers is compiled in several "
    "graphs: leave out fullgraph=True"
)

_follower: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
"""Returns what the compiler has that looks at each frame of this thread, None if nothing does."""


def uncompiled(function: _F) -> _F:
    """Return a function that graphs break around. The compiler would else follow it into the core, and trace that.

    The compiler is loaded when it is first used: that takes a second, which most programs that import this do without.
    Where none follows what runs now, none is told to stop, which takes longer than many of these functions.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules or _follower() is None:
            return function(*args, **kwargs)
        if "disabled" not in vars(called):
            vars(called)["disabled"] = torch.compiler.disable(function)
        return vars(called)["disabled"](*args, **kwargs)

    vars(called).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_WHY)  # what the compiler says of it
    return cast(_F, called)


@contextmanager
def uncompiled_calls() -> Iterator[None]:
    """Let models that are compiled run as they are written, for a while: nobody can look into a graph."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def original(value: Any) -> Any:
    """Return the module that another is a compiled one of, and what is none itself.

    What others call `_orig_mod` is their own affair.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while compiler is not None and isinstance(value, compiler.OptimizedModule):
        value = value._orig_mod
    return value


def leave_uncompiled(names: Sequence[str]) -> None:
    """Let graphs break around all that is in these modules and packages.

    The compiler is told when it is loaded, which takes a second: nobody waits for that here, nor looks at each call.
    """
    if "torch._dynamo" in sys.modules:
        _tell(names)
    else:
        sys.meta_path.insert(0, _Compiler(names))


class _Compiler:
    """A finder that sees to it that the compiler hears of names when it is imported."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return nothing, as for a module that it does not know, but for the compiler."""
        if name != "torch._dynamo" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_tell(module: Any) -> None:
                load(module)
                _tell(self._names)

            loader.exec_module = load_and_tell
        return spec


def _tell(names: Sequence[str]) -> None:
    from torch._dynamo import trace_rules

    for name in names:
        trace_rules.add(name)
