"""Kernel decorators: compile functions with numba, and cache the code with `cache`.

numba's own cache has four problems. It keeps one index per function without locking, so two processes that change it at
once may load each other's code. It considers code fresh even if a module that the function includes has changed. It
runs files from folders that others can write to. A damaged file ends the job. This module therefore only uses numba's
serialization of compiled code, through the three methods that its dispatchers call.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import llvmlite.binding as llvm
import numba as nb
from numba.core import sigutils, types
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from commlib.kernels import cache, host
from commlib.kernels.compile_lock import lock_compilation
from commlib.kernels.fields.builtins import NEVER_CALLED
from commlib.kernels.shield import run_shielded


def kernel(**options: Any) -> Callable[[Any], Any]:
    """Compile a function as `numba.njit(**options)` does, once per type of CPU: later processes load the code.

    The function's closure may contain only strings, numbers and types, because they are part of the file name.
    """

    def decorate(function: Any) -> Any:
        dispatcher = nb.njit(**options)(function)
        dispatcher._cache = cache = _DiskCache(function)
        compile_here = dispatcher.compile

        @functools.wraps(compile_here)
        def compile_once(signature: Any) -> Any:
            if tuple(sigutils.normalize_signature(signature)[0]) in dispatcher.overloads:
                return compile_here(signature)
            return run_shielded(in_turn, signature, unless=global_compiler_lock.is_locked)

        def in_turn(signature: Any) -> Any:
            with global_compiler_lock, cache.turn(signature, dispatcher.targetctx):
                return compile_here(signature)  # which returns the code if another thread has compiled it

        dispatcher.compile = compile_once
        return dispatcher

    return decorate


_NUMBERS = {"int": types.int64, "None": types.void}


def compile_object(name: str, file: str) -> tuple[str, bytes]:
    """Compile a kernel of numbers to object code, and store it in a file; return its symbol and the code.

    If another process of this node compiles it now, its code is loaded. name: "module.function". Raises TypeError for
    arguments other than numbers.
    """

    def in_turn() -> tuple[str, bytes]:
        with global_compiler_lock, lock_compilation(file, lambda: cache.read(file) is not None):
            if (kept := cache.read_code(file)) is not None:
                return kept
            function, signature, options = _source(name)
            compiled = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
            compiled.compile()
            unknown = [one for one in _missing_symbols(compiled._library) if not _is_there(one)]
            if unknown:
                raise TypeError(f"{name}: machine code runs without numba's run time, but calls {', '.join(unknown)}")
            symbol, code = compiled._wrapper_name, compiled._library._get_compiled_object()
            cache.write_code(file, symbol, code)
            return symbol, code

    result: tuple[str, bytes] = run_shielded(in_turn, unless=global_compiler_lock.is_locked)
    return result


def _is_there(symbol: str) -> bool:
    """Return whether a symbol is there without numba: of the C library, of Python, or one of those never called."""
    if symbol.startswith(("numba_", "NRT_")):
        return symbol in NEVER_CALLED
    return llvm.address_of_symbol(symbol) is not None


def _source(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a kernel's function, its C signature and its options."""
    module, _, rest = name.partition(".")
    source: Any = getattr(importlib.import_module(f"{host.__name__}.{module}"), rest.partition("-")[0])
    if "-" in rest:  # a family of kernels, such as the reductions
        source = source(*rest.split("-")[1:])
    function = source.py_func
    kinds = dict(function.__annotations__)
    result = _NUMBERS[kinds.pop("return")]
    if any(kind not in _NUMBERS for kind in kinds.values()):
        raise TypeError(f"{name}: a kernel that is called through machine code takes only numbers, got {kinds}")
    options = {key: value for key, value in source.targetoptions.items() if key != "nopython"}
    return function, result(*[_NUMBERS[kind] for kind in kinds.values()]), options


@atexit.register
def _await_compilation() -> None:
    """Wait for the compilation of an interrupted call, because LLVM must not be unloaded during it."""
    with global_compiler_lock:
        pass


class _DiskCache(NullCache):  # type: ignore[misc]
    """The cache interface of numba's dispatchers for one function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def turn(self, signature: Any, context: Any) -> AbstractContextManager[None]:
        name = self._name(signature, context.codegen())
        return lock_compilation(name, lambda: cache.read(name) is not None)

    def load_overload(self, signature: Any, context: Any) -> Any:
        name = self._name(signature, context.codegen())
        if (data := cache.read(name)) is None:
            return None
        try:
            needed, parts = pickle.loads(data)
            provide(needed, context)
            return CompileResult._rebuild(context, *parts)
        except Exception as error:  # complete, but from another numba with the same version
            cache.discard(name, f"cannot be loaded ({type(error).__name__}: {error})")
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if not result.library.has_dynamic_globals:  # these are addresses of this process
            parts = (_missing_symbols(result.library), result._reduce())
            cache.write(self._name(signature, result.library.codegen), dumps(parts))

    def _name(self, signature: Any, codegen: Any) -> str:
        """Return the file name of one specialization, from its argument types, its closure and the type of CPU."""
        function = self._function
        arguments, result = sigutils.normalize_signature(signature)
        cells = [str(cell.cell_contents) for cell in function.__closure__ or ()]
        line = str(function.__code__.co_firstlineno)
        texts = (line, str(arguments), str(result), *map(str, codegen.magic_tuple()), *cells)
        module = function.__module__.rpartition(".")[2]
        return f"{module}.{function.__name__}-{cache.digest(*map(str.encode, texts))}"


def _missing_symbols(library: Any) -> list[str]:
    """Return the undefined symbols of compiled code. Code that runs without one of them ends the process."""
    module = library._final_module
    there = (symbol for symbols in (module.functions, module.global_variables) for symbol in symbols)
    return [symbol.name for symbol in there if symbol.is_declaration and not symbol.name.startswith("llvm.")]


def provide(needed: list[str], context: Any) -> None:
    """Load the symbols that code needs before it is loaded: numba's run time, for most code.

    numba's compiler takes 0.4 s to import, and is imported only for symbols without another source.
    """
    for bring_in in (lambda: rtsys.initialize(context), context.refresh):
        if all(map(llvm.address_of_symbol, needed)):
            return
        bring_in()
