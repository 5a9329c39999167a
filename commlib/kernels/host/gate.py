"""Calls of verbs and plans from Python, in one builtin: find the kind of call, take the lock, run the kernel.

In Python these steps take as long as a small collective. The builtins do what `runtime.compiled_call` does: they take
the lock of the group's launch order if nothing is queued or recorded, note the call, and run its kernel without the
GIL. All other calls go to Python: other arrays, a busy group, recorded calls, and what a kernel cannot finish alone.

No signal handler runs within a builtin, so there is no moment at which a handler's exception loses the lock, except at
the beginning of the Python function that continues a call. Then `LOST` is set, and all later calls fail.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba.core import types

from commlib.kernels.fields.arrays import ALIGNED, C_CONTIGUOUS, DATA, DESCR, FLAGS, NDIM, SHAPE, TYPE, WRITEABLE
from commlib.kernels.fields.gate import (
    ANY_ARRAY,
    FALSE,
    GATE_FIELDS,
    GIVE_BACK,
    HELD,
    K_ADDRESS,
    K_DIMENSIONS,
    K_DTYPE,
    K_EMPTY,
    K_ITEM_BYTES,
    K_KERNEL,
    K_KEYS,
    K_RESULT,
    K_RESULT_DIMENSIONS,
    K_RESULT_SHAPE,
    K_RESUME,
    K_SHAPE,
    K_TEXT,
    KIND_FIELDS,
    KINDS,
    LOST,
    NDARRAY,
    NEW_ARRAY,
    NONE,
    NOT_HERE,
    NOTE,
    NOTHING,
    OBJECTS,
    P_ADDRESS,
    P_GATE,
    P_KERNEL,
    P_OBJECTS,
    P_OTHERWISE,
    P_RESUME,
    P_SOURCE,
    P_TARGET,
    P_TEXT,
    P_VALUE,
    PENDING,
    PLAN_FIELDS,
    SAME_ARRAY,
    TAKE,
    TRUE,
    V_GATE,
    V_KINDS,
    V_OBJECTS,
    VERB_FIELDS,
    mix,
)
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import int32, table
from commlib.kernels.host.builtins import as_object, call_code, release_lock, take_lock
from commlib.kernels.host.compilation import kernel

call_object = types.ExternalFunction("PyObject_Vectorcall", types.intp(types.intp, types.intp, types.intp, types.intp))
keep_object = types.ExternalFunction("Py_IncRef", types.void(types.intp))
drop_object = types.ExternalFunction("Py_DecRef", types.void(types.intp))  # nothing for 0

mix_number = nb.njit(inline="always")(mix)

_READABLE = C_CONTIGUOUS | ALIGNED
_WRITABLE = C_CONTIGUOUS | ALIGNED | WRITEABLE
_WORDS = 24  # bytes of three numbers


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _enter(gate: Any, objects: int, text_at: int) -> Any:
    """Take the lock and note a call, if nothing is queued or recorded; return whether that was possible."""
    taken = call_object(gate[TAKE], objects + 8 * FALSE, 1, 0)
    drop_object(taken)
    if taken != table(objects, OBJECTS)[TRUE]:
        return False
    if gate[PENDING] != 0:
        drop_object(call_object(gate[GIVE_BACK], 0, 0, 0))
        return False
    drop_object(call_object(gate[NOTE], text_at, 1, 0))
    return True


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _resume(gate: Any, function: int, status: int, x: int, target: int) -> Any:
    """Let Python continue a call; return its value, or 0 after an exception."""
    arguments, number = ins.stack(_WORDS), as_object(status)
    given = table(arguments, 3)
    given[0], given[1], given[2] = number, x, target
    gate[HELD] = 1
    value = call_object(function, arguments, 3, 0)
    drop_object(number)
    if gate[HELD] != 0:
        gate[HELD] = 0
        gate[LOST] = 1
    return value


@kernel()
def run_plan(self: int, arguments: int, count: int) -> int:
    """Run a plan, which takes no arguments: METH_FASTCALL. `self` is a numpy array of the fields of a plan."""
    at = ins.load_acquire(self + DATA)
    plan = table(at, PLAN_FIELDS)
    gate = table(plan[P_GATE], GATE_FIELDS)
    if _enter(gate, plan[P_OBJECTS], at + 8 * P_TEXT):
        thread = release_lock()
        status = call_code(plan[P_KERNEL], plan[P_ADDRESS], 0, 0, 0, 0, 0, 0)
        take_lock(thread)
        if status == 0:
            drop_object(call_object(gate[GIVE_BACK], 0, 0, 0))
            keep_object(plan[P_VALUE])
            return plan[P_VALUE]
        value = _resume(gate, plan[P_RESUME], status, plan[P_SOURCE], plan[P_TARGET])
    else:
        value = call_object(plan[P_OTHERWISE], at + 8 * P_SOURCE, 2, 0)
    if value == 0:
        return 0
    drop_object(value)
    keep_object(plan[P_VALUE])
    return plan[P_VALUE]


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _has(array: int, flags: int, dtype: int, dimensions: int, lengths: Any, first: int) -> Any:
    """Return whether a numpy array has these flags, this dtype, and the shape that begins at lengths[first]."""
    if int32(array + FLAGS) & flags != flags or ins.load_acquire(array + DESCR) != dtype:
        return False
    if int32(array + NDIM) != dimensions:
        return False
    shape = table(ins.load_acquire(array + SHAPE), dimensions)
    for dimension in range(dimensions):  # noqa: SIM110  numba has no generators
        if shape[dimension] != lengths[first + dimension]:
            return False
    return True


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _bytes(array: int, dtype_bytes: int) -> Any:
    nbytes = dtype_bytes
    dimensions = int32(array + NDIM)
    shape = table(ins.load_acquire(array + SHAPE), dimensions)
    for dimension in range(dimensions):
        nbytes *= shape[dimension]
    return nbytes


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _find(verb: Any, given: Any, count: int) -> Any:
    """Return the address of the kind of a call, or 0 if Python must look at it."""
    objects = table(verb[V_OBJECTS], OBJECTS)
    x = given[0]
    if ins.load_acquire(x + TYPE) != objects[NDARRAY]:
        return 0
    dtype, dimensions = ins.load_acquire(x + DESCR), int32(x + NDIM)
    number = mix_number(0, dtype)
    shape = table(ins.load_acquire(x + SHAPE), dimensions)
    for dimension in range(dimensions):
        number = mix_number(number, shape[dimension])
    for key in range(2, count):
        number = mix_number(number, given[key])
    at = verb[V_KINDS] + 8 * KIND_FIELDS * (number & (KINDS - 1))
    kind = table(at, KIND_FIELDS)
    if not _has(x, _READABLE, kind[K_DTYPE], kind[K_DIMENSIONS], kind, K_SHAPE):
        return 0
    for key in range(2, count):
        if given[key] != kind[K_KEYS + key - 2]:
            return 0
    return at


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_result(kind: Any, objects: Any, x: int, out: int, item_bytes: int) -> Any:
    """Return whether `out`, which is not None, can take the result: Python refuses all others."""
    if out == x:
        return kind[K_RESULT] in (ANY_ARRAY, SAME_ARRAY) and int32(x + FLAGS) & _WRITABLE == _WRITABLE
    if kind[K_RESULT] == SAME_ARRAY or ins.load_acquire(out + TYPE) != objects[NDARRAY]:
        return False
    if not _has(out, _WRITABLE, kind[K_DTYPE], kind[K_RESULT_DIMENSIONS], kind, K_RESULT_SHAPE):
        return False
    first, second = ins.load_acquire(x + DATA), ins.load_acquire(out + DATA)
    return first + _bytes(x, item_bytes) <= second or second + _bytes(out, item_bytes) <= first


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _not_here(objects: Any) -> Any:
    keep_object(objects[NOT_HERE])
    return objects[NOT_HERE]


@kernel()
def run_verb(self: int, arguments: int, count: int) -> int:
    """Run a verb: METH_FASTCALL with (x, out, other arguments). `self` is a numpy array of the fields of a verb."""
    verb = table(ins.load_acquire(self + DATA), VERB_FIELDS)
    given = table(arguments, count)
    found = _find(verb, given, count)
    if found == 0:
        return _not_here(table(verb[V_OBJECTS], OBJECTS))
    kind, objects = table(found, KIND_FIELDS), table(verb[V_OBJECTS], OBJECTS)
    gate = table(verb[V_GATE], GATE_FIELDS)
    x, target = given[0], given[1]
    if kind[K_RESULT] == NOTHING:
        target = x
        result = objects[NONE]
    else:
        result = target
        if target != objects[NONE] and not _is_result(kind, objects, x, target, kind[K_ITEM_BYTES]):
            return _not_here(objects)
    if target == objects[NONE]:
        target = result = call_object(objects[NEW_ARRAY], found + 8 * K_EMPTY, 2, 0)
        if target == 0:
            return 0
    else:
        keep_object(result)
    if not _enter(gate, verb[V_OBJECTS], found + 8 * K_TEXT):
        drop_object(result)
        return _not_here(objects)
    resume = kind[K_RESUME]
    keep_object(resume)  # and with it all that the kernel uses: another thread may drop this kind meanwhile
    thread = release_lock()
    status = call_code(kind[K_KERNEL], kind[K_ADDRESS], x, target, 0, 0, 0, 0)
    take_lock(thread)
    if status == 0:
        drop_object(call_object(gate[GIVE_BACK], 0, 0, 0))
    else:
        value = _resume(gate, resume, status, x, target)
        drop_object(value)
        if value == 0:
            drop_object(result)
            result = 0
    drop_object(resume)
    return result
