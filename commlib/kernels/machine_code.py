"""Machine code: load compiled kernels, and call them from Python. The compiler is imported only for missing ones.

`commlib.kernels.host` has the kernels' sources; importing it costs 0.4 s of numba. Kernels whose arguments are numbers
are kept as object code, one file each (`cache`), which LLVM loads in half a millisecond. Python calls them through one
compiled builtin, `builtins.call`: a call costs half as much as one through numba's dispatchers or ctypes.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from commlib.kernels import cache as stored
from commlib.kernels.fields.arrays import are_where_expected
from commlib.kernels.fields.builtins import ADDRESS, ARGUMENTS, FUNCTION_FIELDS, HOLDS_LOCK, NEVER_CALLED
from commlib.kernels.shield import run_shielded

HAS_BUILTINS = are_where_expected() and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Whether compiled code may read numpy's arrays, and use Python's objects under the GIL. Else Python does all of it."""

_BUILTIN = "builtins.call"
_FASTCALL = 0x0080  # METH_FASTCALL
_loading = threading.RLock()
_addresses: dict[str, int] = {}


@cache
def cpu() -> tuple[str, str, str]:
    """Return the machine that code is for: LLVM's triple, the name of the CPU, and its features."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = ""
        if not name:
            with suppress(RuntimeError):  # LLVM does not know them
                features = llvm.get_host_cpu_features().flatten()
    return llvm.get_process_triple(), name or llvm.get_host_cpu_name(), features


def file_name(name: str) -> str:
    """Return the name of a kernel's file in the cache."""
    return f"{name}-{stored.digest(*map(str.encode, cpu()))}"


@cache
def entry_point(name: str, arguments: int = 1, *, holds_lock: bool = False) -> Callable[..., int]:
    """Return a kernel as a builtin that takes this number of ints and returns its status. name: "module.function".

    It is loaded or compiled here. holds_lock: it keeps the GIL while it runs; for kernels that take nanoseconds.
    """
    return _as_builtin(name, address(name), arguments, holds_lock)


def address(name: str) -> int:
    """Return the address of a kernel's machine code, with numbers as C arguments; load or compile it first."""
    known = _addresses.get(name)
    return run_shielded(_find, name) if known is None else known  # type: ignore[no-any-return]


def _find(name: str) -> int:
    with _loading:
        if name not in _addresses:
            _addresses[name] = _load_or_compile(name)
        return _addresses[name]


def _load_or_compile(name: str) -> int:
    file = file_name(name)
    try:
        if (code := stored.read_code(file)) is not None:
            return _load(*code)
    except Exception as error:  # complete, but not what this LLVM loads
        stored.discard(file, f"cannot be loaded ({type(error).__name__}: {error})")
    from commlib.kernels.host.compilation import compile_object

    return _load(*compile_object(name, file))


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Kernels do not raise, so they never call numba's run time, but their code refers to it.
    abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for symbol in NEVER_CALLED:
        if not llvm.address_of_symbol(symbol):
            llvm.add_symbol(symbol, abort)
    return llvm.Target.from_default_triple().create_target_machine(jit=True)


_engines: list[Any] = []  # code lives as long as its engine


def _load(symbol: str, code: bytes) -> int:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    found: int = engine.get_function_address(symbol)
    if not found:
        raise RuntimeError(f"there is no {symbol} in the code")
    return found


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_methods: dict[int, _Method] = {}
_new_builtin = ctypes.pythonapi.PyCFunction_NewEx
_new_builtin.restype, _new_builtin.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)


def builtin(code: int, fields: Any, name: str) -> Callable[..., Any]:
    """Return machine code with the signature of METH_FASTCALL as a builtin; its `self` is the array `fields`."""
    method = _methods.setdefault(code, _Method(name.encode(), code, _FASTCALL, None))
    result: Callable[..., Any] = _new_builtin(ctypes.addressof(method), fields, None)
    return result


def _as_builtin(name: str, code: int, arguments: int, holds_lock: bool) -> Callable[..., Any]:
    if not HAS_BUILTINS:  # another layout of numpy arrays, or another Python
        kind = ctypes.PYFUNCTYPE if holds_lock else ctypes.CFUNCTYPE
        return kind(ctypes.c_int64, *[ctypes.c_int64] * arguments)(code)
    fields = np.zeros(FUNCTION_FIELDS, np.int64)
    fields[ADDRESS], fields[ARGUMENTS], fields[HOLDS_LOCK] = code, arguments, holds_lock
    return builtin(address(_BUILTIN), fields, name)
