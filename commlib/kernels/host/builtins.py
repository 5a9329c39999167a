"""Builtins: functions with Python's C calling convention, which Python calls without a wrapper of the compiler."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commlib.kernels.fields.arrays import DATA
from commlib.kernels.fields.builtins import ADDRESS, ARGUMENTS, FUNCTION_FIELDS, HOLDS_LOCK, MOST_ARGUMENTS
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel

as_int = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.intp))
as_object = types.ExternalFunction("PyLong_FromLongLong", types.intp(types.int64))
error_occurred = types.ExternalFunction("PyErr_Occurred", types.intp())
bad_call = types.ExternalFunction("PyErr_BadArgument", types.int32())
release_lock = types.ExternalFunction("PyEval_SaveThread", types.intp())
take_lock = types.ExternalFunction("PyEval_RestoreThread", types.void(types.intp))


_ARGUMENT_BYTES = 8 * MOST_ARGUMENTS


@intrinsic
def call_code(typingctx: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
    """Call machine code at an address with int64 arguments; return its int64 result.

    It may take fewer arguments: in the calling conventions of x86-64 and aarch64 the rest is ignored.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        function_type = ir.FunctionType(number, [number] * MOST_ARGUMENTS)
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])

    return types.int64(*([types.int64] * (1 + MOST_ARGUMENTS))), codegen


@kernel()
def call(self: int, arguments: int, count: int) -> int:
    """Call machine code with ints: METH_FASTCALL. `self` is a numpy array of the fields of a function."""
    function = table(ins.load_acquire(self + DATA), FUNCTION_FIELDS)
    if count != function[ARGUMENTS] or count > MOST_ARGUMENTS:
        bad_call()
        return 0
    given, numbers = table(arguments, count), table(ins.stack(_ARGUMENT_BYTES), MOST_ARGUMENTS)
    failed = False
    for number in range(MOST_ARGUMENTS):
        numbers[number] = as_int(given[number]) if number < count else 0
        failed |= numbers[number] == -1  # which may also be a number
    if failed and error_occurred() != 0:
        return 0
    thread = 0 if function[HOLDS_LOCK] != 0 else release_lock()
    status = call_code(
        function[ADDRESS], numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]
    )
    if thread != 0:
        take_lock(thread)
    return as_object(status)
