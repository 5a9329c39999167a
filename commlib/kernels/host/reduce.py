"""Reduction arithmetic: one small compiled function per dtype and operation, compiled on first use.

    reduce(inputs, n_inputs, outputs, n_outputs, offset, count, divisor)

reads `count` elements at byte `offset` from each of the `n_inputs` addresses in the table `inputs`, combines them in
the order of the table, divides by `divisor` if the operation is a mean, and stores the result at each address in
`outputs`. An output may be one of the inputs. float16 and bfloat16 are combined in float32 and rounded once, at the
end. `exact_mean` has a separate function for the mean of 64-bit integers.

The node's collectives (`node`) and the executor call these functions by address, so their protocols are compiled once,
instead of once per dtype.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.core import types
from numba.extending import overload

from commlib.dtypes import HALVES, accumulator_dtype
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.exact_mean import mean_function, sum_of_halves

# numba has no type for these; their bits are stored as integers.
_STORED = {"float16": "uint16", "bfloat16": "uint16", "bool": "uint8"}

# Elements per pass: the accumulator (4 to 32 KiB) stays in the L1 cache until the result is stored.
BLOCK = 1024

# Positions of the two bfloat16 in a 32-bit word.
LOW, HIGH = nb.uint32(16), nb.uint32(0xFFFF0000)


@kernel()
def reduce_as_written(address: int) -> int:
    """Call a reduction of a few elements. The address holds eight int64: the function's address and its arguments.

    A call through ctypes takes a microsecond more.
    """
    at = nb.carray(ins.as_pointer(address), 8, np.int64)
    ins.call_reduce(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7])
    return 0


def widen(kind: str, bits: Any) -> Any:
    """Convert a stored element to the type of the computation."""


def narrow(kind: str, value: Any) -> Any:
    """Convert a computed value to the stored type."""


def fuse(kind: str, operation: str, a: Any, b: Any, divisor: int) -> Any:
    """Reduce two stored elements to one; for bfloat16, two words of two elements each."""


def reduce_pair(kind: str, operation: str, sources: Any, targets: Any, count: int, divisor: int) -> Any:
    """Reduce two arrays into one, or into each of two; all are given by their addresses.

    Returns the number of elements processed. The general path processes the rest: elements that do not fill a vector,
    and all elements in rare cases.
    """


def combine(operation: str, a: Any, b: Any) -> Any:
    """Combine two values, the lower rank's first."""


def finish(operation: str, value: Any, divisor: int) -> Any:
    """Divide by the number of ranks if the operation is a mean: integers truncate toward zero."""


@overload(widen, prefer_literal=True, strict=False)
def _widen(kind: Any, bits: Any) -> Any:
    if not isinstance(kind, types.StringLiteral):
        return None
    if kind.literal_value == "float16":
        return lambda kind, bits: ins.half_to_float(bits)
    if kind.literal_value == "bfloat16":
        return lambda kind, bits: ins.bfloat_to_float(bits)
    if kind.literal_value == "bool":
        return lambda kind, bits: nb.uint8(bits != 0)  # any nonzero byte is true
    return lambda kind, bits: bits


@overload(narrow, prefer_literal=True, strict=False)
def _narrow(kind: Any, value: Any) -> Any:
    if not isinstance(kind, types.StringLiteral):
        return None
    if kind.literal_value == "float16":
        return lambda kind, value: ins.float_to_half(value)
    if kind.literal_value == "bfloat16":
        return lambda kind, value: ins.float_to_bfloat(value)
    return lambda kind, value: value


# NaN wins a minimum or maximum, as in numpy: "not a < b and not a == a" picks a NaN from either operand.
_MIN = (lambda operation, a, b: a if (a <= b or a != a) else b, lambda operation, a, b: a if a <= b else b)
_MAX = (lambda operation, a, b: a if (a >= b or a != a) else b, lambda operation, a, b: a if a >= b else b)
_COMBINE = {
    "sum": lambda operation, a, b: a + b,
    "mean": lambda operation, a, b: a + b,
    "prod": lambda operation, a, b: a * b,
    "or": lambda operation, a, b: a | b,
    "and": lambda operation, a, b: a & b,
}


@overload(combine, prefer_literal=True, strict=False)
def _combine(operation: Any, a: Any, b: Any) -> Any:
    if not isinstance(operation, types.StringLiteral):
        return None
    name = operation.literal_value
    if name in ("min", "max"):
        return (_MIN if name == "min" else _MAX)[0 if isinstance(a, types.Float) else 1]
    return _COMBINE[name]


@overload(finish, prefer_literal=True, strict=False)
def _finish(operation: Any, value: Any, divisor: Any) -> Any:
    if not isinstance(operation, types.StringLiteral):
        return None
    if operation.literal_value != "mean":
        return lambda operation, value, divisor: value
    if isinstance(value, types.Integer):
        wide = nb.int64 if value.signed else nb.uint64
        if value.signed:

            def truncate(operation: Any, value: Any, divisor: Any) -> Any:
                quotient = wide(value) // divisor  # rounds down
                return quotient + 1 if value < 0 and quotient * divisor != value else quotient

            return truncate
        return lambda operation, value, divisor: wide(value) // wide(divisor)
    # The divisor in the value's type: a wider one would widen the entire loop.
    own = nb.float32 if value in (types.float32, types.complex64) else nb.float64
    return lambda operation, value, divisor: value / own(divisor)


@overload(fuse, prefer_literal=True, strict=False)
def _fuse(kind: Any, operation: Any, a: Any, b: Any, divisor: Any) -> Any:
    if not isinstance(kind, types.StringLiteral) or not isinstance(operation, types.StringLiteral):
        return None
    name, op = kind.literal_value, operation.literal_value
    if name != "bfloat16":
        return lambda kind, operation, a, b, divisor: narrow(
            name, finish(op, combine(op, widen(name, a), widen(name, b)), divisor)
        )

    def fuse_words(kind: Any, operation: Any, a: Any, b: Any, divisor: Any) -> Any:
        # Two bfloat16 in a word are the upper halves of two float32: faster than unpacking and packing the lanes.
        low = combine(op, ins.bits_float(nb.uint32(a << LOW)), ins.bits_float(nb.uint32(b << LOW)))
        high = combine(op, ins.bits_float(nb.uint32(a & HIGH)), ins.bits_float(nb.uint32(b & HIGH)))
        low_bits = ins.round_to_bfloat(finish(op, low, divisor))
        high_bits = ins.round_to_bfloat(finish(op, high, divisor))
        return nb.uint32(low_bits >> LOW) | nb.uint32(high_bits & HIGH)

    return fuse_words


@overload(reduce_pair, prefer_literal=True, strict=False)
def _reduce_pair(kind: Any, operation: Any, sources: Any, targets: Any, count: Any, divisor: Any) -> Any:
    if not isinstance(kind, types.StringLiteral) or not isinstance(operation, types.StringLiteral):
        return None
    name, op = kind.literal_value, operation.literal_value
    stored = getattr(nb, _STORED.get(name, name))
    unit, per_unit = (nb.uint32, 2) if name == "bfloat16" else (stored, 1)

    def loops(kind: Any, operation: Any, sources: Any, targets: Any, count: Any, divisor: Any) -> Any:
        units = count // per_unit
        x = nb.carray(ins.as_pointer(sources[0]), units, unit)
        y = nb.carray(ins.as_pointer(sources[1]), units, unit)
        z = nb.carray(ins.as_pointer(targets[0]), units, unit)
        # LLVM vectorizes a loop only if it can see that the written memory is read memory or does not overlap it, so
        # there is one loop per case.
        if targets[0] == sources[0] and targets[1] == sources[1]:
            for i in range(units):
                x[i] = y[i] = fuse(name, op, x[i], y[i], divisor)
        elif targets[0] != targets[1]:
            return 0  # into two separate arrays
        elif targets[0] == sources[0]:
            for i in range(units):
                x[i] = fuse(name, op, x[i], y[i], divisor)
        elif targets[0] == sources[1]:
            for i in range(units):
                y[i] = fuse(name, op, x[i], y[i], divisor)
        else:
            for i in range(units):
                z[i] = fuse(name, op, x[i], y[i], divisor)
        return units * per_unit

    def vectors(kind: Any, operation: Any, sources: Any, targets: Any, count: Any, divisor: Any) -> Any:
        if divisor & (divisor - 1) != 0:
            return 0
        done = count - count % ins.HALVES
        for at in range(0, 2 * done, 2 * ins.HALVES):
            ins.fuse_halves(op, sources[0] + at, sources[1] + at, targets[0] + at, targets[1] + at, divisor)
        x = nb.carray(ins.as_pointer(sources[0]), count, stored)
        y = nb.carray(ins.as_pointer(sources[1]), count, stored)
        z = nb.carray(ins.as_pointer(targets[0]), count, stored)
        other_z = nb.carray(ins.as_pointer(targets[1]), count, stored)
        for i in range(done, count):
            z[i] = other_z[i] = fuse(name, op, x[i], y[i], divisor)
        return count

    return vectors if name == "float16" else loops


def stored_type(dtype: str) -> Any:
    """Return the type in which elements of a dtype are stored."""
    return getattr(np, _STORED.get(dtype, dtype))


def reduction(dtype: str, operation: str) -> Any:
    """Return the kernel for one dtype and one of sum, mean, prod, min, max (or, and: bool only)."""
    if dtype == HALVES:
        return sum_of_halves()
    if accumulator_dtype(dtype, operation) == HALVES:
        return mean_function(dtype)
    kind = dtype
    stored = stored_type(dtype)
    combined = getattr(np, _STORED.get(accumulator := accumulator_dtype(dtype, operation), accumulator))
    size, nbytes = np.dtype(stored).itemsize, BLOCK * np.dtype(combined).itemsize

    # The closure holds only strings, numbers and types, because numba keys its disk cache by their pickles.
    @kernel(nogil=True)
    def reduce(inputs: int, n_inputs: int, outputs: int, n_outputs: int, offset: int, count: int, divisor: int) -> None:
        sources = nb.carray(ins.as_pointer(inputs), n_inputs, np.int64)
        targets = nb.carray(ins.as_pointer(outputs), n_outputs, np.int64)
        done = 0
        if n_inputs == 2 and n_outputs <= 2:
            pair = (sources[0] + offset, sources[1] + offset)
            results = (targets[0] + offset, targets[n_outputs - 1] + offset)
            done = reduce_pair(kind, operation, pair, results, count, divisor)
        if done == count:
            return
        totals = nb.carray(ins.as_pointer(ins.stack(nbytes)), BLOCK, combined)
        for start in range(done, count, BLOCK):
            length = min(BLOCK, count - start)
            here = offset + start * size
            block = totals[:length]
            first = nb.carray(ins.as_pointer(sources[0] + here), length, stored)
            for i in range(length):
                block[i] = widen(kind, first[i])
            for k in range(1, n_inputs):
                other = nb.carray(ins.as_pointer(sources[k] + here), length, stored)
                for i in range(length):
                    block[i] = combine(operation, block[i], widen(kind, other[i]))
            result = nb.carray(ins.as_pointer(targets[0] + here), length, stored)
            for i in range(length):
                result[i] = narrow(kind, finish(operation, block[i], divisor))
            for k in range(1, n_outputs):
                ins.memcpy(targets[k] + here, targets[0] + here, length * size)

    return reduce
