"""The decorators that compile kernels: numba's, with a cache of ours behind them.

numba's own cache keeps one index for each function and takes its word for it, so that two processes which change it at
once may take each other's code; it counts code as fresh though a module that the function includes has changed; it runs
what lies in a folder that others can write to; and a damaged file ends the job. So only numba's way to make bytes of
compiled code is used, through the three methods that its dispatchers call.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import llvmlite.binding as llvm
import numba as nb
from numba.core import sigutils
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from commlib.kernels.host import cache
from commlib.kernels.host.turns import turn


def kernel(**options: Any) -> Callable[[Any], Any]:
    """Compile a function as `numba.njit(**options)` does, once on this kind of CPU: later processes load the code.

    Whatever the function's closure holds must be a string, a number or a type: the code is kept by their names.
    """

    def decorate(function: Any) -> Any:
        dispatcher = nb.njit(**options)(function)
        dispatcher._cache = kept = _Kept(function)
        compile_here = dispatcher.compile

        @functools.wraps(compile_here)
        def compile_once(signature: Any) -> Any:
            if tuple(sigutils.normalize_signature(signature)[0]) in dispatcher.overloads:
                return compile_here(signature)
            return undisturbed(in_turn, signature)

        def in_turn(signature: Any) -> Any:
            with global_compiler_lock, kept.turn(signature, dispatcher.targetctx):
                return compile_here(signature)  # which returns what another thread has compiled meanwhile

        dispatcher.compile = compile_once
        return dispatcher

    return decorate


def callback(signature: Any, **options: Any) -> Callable[[Any], Any]:
    """Compile a function as `numba.cfunc(signature, **options)` does, once on this kind of CPU, as `kernel` does."""

    def decorate(function: Any) -> Any:
        compiled = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        compiled._cache = kept = _Kept(function)

        def in_turn() -> None:
            with global_compiler_lock, kept.turn(compiled._sig, compiled._targetdescr.target_context):
                compiled.compile()

        undisturbed(in_turn)
        return compiled

    return decorate


def undisturbed(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return `work(*arguments)`, in the middle of which the handler of a signal cannot raise.

    Python runs handlers in the main thread, so a thread of its own does the work. Whoever is interrupted while waiting
    for it leaves it to end: numba, left half-way, could not compile any more.
    """
    if threading.current_thread() is not threading.main_thread() or global_compiler_lock.is_locked():
        return work(*arguments)  # in the second case for a kernel, or a user's function, that is being compiled here
    results: list[Any] = []
    errors: list[BaseException] = []
    running = threading.Lock()  # of Python's threads, these alone may be interrupted at any instruction
    running.acquire()

    def run() -> None:
        try:
            results.append(work(*arguments))
        except BaseException as error:
            errors.append(error)
        finally:
            running.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # Python is ending, or has no room for a thread
        return work(*arguments)
    with running:
        pass
    for error in errors:
        raise error
    return results[0]


@atexit.register
def _let_it_end() -> None:
    """Wait for what an interrupted call has left to be compiled: LLVM must not go while it works."""
    with global_compiler_lock:
        pass


class _Kept(NullCache):  # type: ignore[misc]
    """What numba asks for the code of one function, and hands what it has compiled."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def turn(self, signature: Any, context: Any) -> AbstractContextManager[None]:
        name = self._name(signature, context.codegen())
        return turn(name, lambda: cache.read(name) is not None)

    def load_overload(self, signature: Any, context: Any) -> Any:
        name = self._name(signature, context.codegen())
        if (data := cache.read(name)) is None:
            return None
        try:
            needed, parts = pickle.loads(data)
            provide(needed, context)
            return CompileResult._rebuild(context, *parts)
        except Exception as error:  # whole, but for another numba than its version says
            cache.discard(name, f"cannot be loaded ({type(error).__name__}: {error})")
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if not result.library.has_dynamic_globals:  # addresses of this process
            parts = (_needed(result.library), result._reduce())
            cache.write(self._name(signature, result.library.codegen), dumps(parts))

    def _name(self, signature: Any, codegen: Any) -> str:
        """Name the code of one specialisation: of these arguments, what the closure holds, on this kind of CPU."""
        function = self._function
        arguments, result = sigutils.normalize_signature(signature)
        cells = [str(cell.cell_contents) for cell in function.__closure__ or ()]
        line = str(function.__code__.co_firstlineno)
        texts = (line, str(arguments), str(result), *map(str, codegen.magic_tuple()), *cells)
        module = function.__module__.rpartition(".")[2]
        return f"{module}.{function.__name__}-{cache.digest(*map(str.encode, texts))}"


def _needed(library: Any) -> list[str]:
    """Return the symbols that compiled code refers to and does not have: code without all of them ends the process."""
    module = library._final_module
    there = (symbol for symbols in (module.functions, module.global_variables) for symbol in symbols)
    return [symbol.name for symbol in there if symbol.is_declaration and not symbol.name.startswith("llvm.")]


def provide(needed: list[str], context: Any) -> None:
    """Bring in what code refers to that is about to be loaded: numba's run time, which most of it does.

    What numba needs to compile is 0.4 s of imports, and is brought in only for what cannot be had otherwise.
    """
    for bring_in in (lambda: rtsys.initialize(context), context.refresh):
        if all(map(llvm.address_of_symbol, needed)):
            return
        bring_in()
