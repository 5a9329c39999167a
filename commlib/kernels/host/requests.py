"""Persistent messages in compiled code, by the C functions of the library that moves them.

See `transport.base.MessageFunctions`. These calls need no Python. Code that contains function addresses could not be
cached on disk, because the addresses differ between processes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_INT, _POINTER = ir.IntType(32), ir.IntType(64)


@intrinsic
def start(typingctx: Any, function: Any, count: Any, handles: Any) -> Any:
    """Start `count` messages, whose handles are stored consecutively at an address; return 0 or an error code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_INT, [_INT, _POINTER])
        function, count, handles = args
        called = builder.inttoptr(function, function_type.as_pointer())
        return builder.call(called, [builder.trunc(count, _INT), handles])

    return types.int32(types.intp, types.intp, types.intp), codegen


@intrinsic
def test(typingctx: Any, function: Any, count: Any, handles: Any, done: Any, statuses: Any) -> Any:
    """Make progress on messages, and write to the int32 at `done` whether all are complete; return 0 or an error code.

    statuses: an address with space for the status of each message.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_INT, [_INT, _POINTER, _POINTER, _POINTER])
        function, count, handles, done, statuses = args
        called = builder.inttoptr(function, function_type.as_pointer())
        return builder.call(called, [builder.trunc(count, _INT), handles, done, statuses])

    return types.int32(*([types.intp] * 5)), codegen
