"""Persistent messages from compiled code, by the C functions of whatever library moves them.

See `transport.base.MessageFunctions`. Called so, a message costs no Python; numba could not keep code on disk that
names the functions themselves, whose addresses differ from process to process.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_INT, _POINTER = ir.IntType(32), ir.IntType(64)


@intrinsic
def start(typingctx: Any, function: Any, count: Any, handles: Any) -> Any:
    """Start `count` messages, whose handles lie one after the other at an address; return 0, or a code of failure."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_INT, [_INT, _POINTER])
        function, count, handles = args
        called = builder.inttoptr(function, function_type.as_pointer())
        return builder.call(called, [builder.trunc(count, _INT), handles])

    return types.int32(types.intp, types.intp, types.intp), codegen


@intrinsic
def test(typingctx: Any, function: Any, count: Any, handles: Any, done: Any, statuses: Any) -> Any:
    """Let messages move on, and write to the int32 at `done` whether these are complete; return as `start` does.

    statuses: an address where something is written for each of them.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_INT, [_INT, _POINTER, _POINTER, _POINTER])
        function, count, handles, done, statuses = args
        called = builder.inttoptr(function, function_type.as_pointer())
        return builder.call(called, [builder.trunc(count, _INT), handles, done, statuses])

    return types.int32(*([types.intp] * 5)), codegen
