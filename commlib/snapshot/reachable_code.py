"""Reachable code: the functions that a function may call, and the variables that it may change, read from its code."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Mapping
from functools import cache, cached_property, partialmethod, singledispatchmethod
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

NOT_ENTERED = frozenset((
    "commlib", "commlib_torch", "commlib_tensorflow", "torch", "tensorflow", "keras", "numpy", "mpi4py",
    "pytest", "_pytest",
))  # fmt: skip
"""Packages whose objects are skipped, except objects of known kinds. pytest's are behind each assert."""
_SEES_ALL = frozenset(("globals", "eval", "exec"))
"""Names with which a function may change any variable of its module."""
_IMPORT = dis.opmap["IMPORT_NAME"]
_FUNCTIONS = ("__func__", "fget", "fset", "fdel", "func", "dispatcher", "__wrapped__")
_DESCRIPTORS = (property, staticmethod, classmethod, cached_property, partialmethod, singledispatchmethod)


def is_users(value: Any) -> bool:
    """Return whether an object belongs to the user or a model library, not to Python, a framework or commlib."""
    return is_users_kind(type(value)) or isinstance(value, SimpleNamespace)


def is_users_kind(kind: Any) -> bool:
    """Return the same for the objects of a class, and for a function."""
    return is_users_name(kind.__module__)


def is_users_module(module: ModuleType) -> bool:
    """Return the same for the variables of a module."""
    return is_users_name(variables_of(module).get("__name__"))


def is_users_name(name: Any) -> bool:
    """Return the same for the contents of a module, by its name."""
    package = _package(name)
    return package == "__main__" or not (package in NOT_ENTERED or package in sys.stdlib_module_names)


def _package(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_installed(kind: Any) -> bool:
    """Return whether a class or function is from an installed library, and so not written by its user."""
    return _is_installed(kind.__module__)


def is_followed(function: FunctionType, named: Any) -> bool:
    """Return whether an object named in a library's function is followed: not modules or classes of other libraries."""
    kind = type(named)
    if not issubclass(kind, ModuleType | type) or not is_installed(function):
        return True
    name = variables_of(named).get("__name__") if issubclass(kind, ModuleType) else named.__module__
    return _package(name) == _package(function.__module__) or not _is_installed(name)


@cache
def _is_installed(name: Any) -> bool:
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def runs_elsewhere() -> bool:
    """Return whether another thread runs user code."""
    here = threading.get_ident()
    every: list[FrameType | None] = [frame for key, frame in sys._current_frames().items() if key != here]
    while every:
        if (frame := every.pop()) is not None:
            if is_users_name(frame.f_globals.get("__name__")):
                return True
            every.append(frame.f_back)
    return False


def variables_of(module: ModuleType) -> dict[str, Any]:
    """Return the variables of a module, without running a `__getattribute__` of its class."""
    variables: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return variables


def names_in(code: CodeType) -> set[str]:
    """Return the external names in a function's code, including those in nested functions.

    Constants that could be names are included, because the function may look them up, as in `getattr(self, "step")`.
    """
    texts = {one for one in code.co_consts if type(one) is str and one.isidentifier()}
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return texts.union(code.co_names, *inner)


def sees_all(names: set[str]) -> bool:
    """Return whether a function with these names may change any variable of its module."""
    return not _SEES_ALL.isdisjoint(names)


def list_imports(function: FunctionType) -> list[ModuleType]:
    """Return the already loaded modules that a function imports when it runs."""
    names = _imports(function.__code__)
    package = function.__globals__.get("__package__") or ""
    every = (sys.modules.get(name) or sys.modules.get(f"{package}.{name}") for name in names)
    return [one for one in every if one is not None and issubclass(type(one), ModuleType)]


def _imports(code: CodeType) -> set[str]:
    """Return the names in code that imports, which include the imported modules; none if it imports nothing."""
    own = code.co_names if _IMPORT in code.co_code[::2] else ()
    return set(own).union(*(_imports(one) for one in code.co_consts if isinstance(one, CodeType)))


def functions_of(attributes: Mapping[str, Any]) -> list[tuple[str, FunctionType]]:
    """Return the functions of a class by attribute, including those wrapped in properties, decorators and the like."""
    functions = []
    for name, value in attributes.items():
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if type(one) is FunctionType:
                functions.append((name, one))
            elif issubclass(type(one), _DESCRIPTORS):
                waiting += [inner for part in _FUNCTIONS if (inner := getattr(one, part, None)) is not None]
    return functions
