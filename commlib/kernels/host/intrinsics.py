"""Intrinsics: operations that numba lacks: raw pointers, ordered loads and stores, yields, half precision.

All are LLVM IR through llvmlite. Inline assembly would not survive numba's disk cache on another CPU.
"""

from __future__ import annotations

import platform
from typing import Any

import numba as nb
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from commlib.kernels.host import half

sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))

_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}.get(platform.machine())


@intrinsic
def as_pointer(typingctx: Any, address: Any) -> Any:
    """Return the integer `address` as a void pointer, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """Read the int64 at `address`; no later read in the program moves before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the int64 `value` to `address`; all earlier writes in the program are visible by then."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def prefetch_to_write(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at `address` for a write, because another core may own it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        builder.call(function, [builder.inttoptr(args[0], pointer), i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic(prefer_literal=True)
def stack(typingctx: Any, nbytes: Any) -> Any:
    """Return the address of `nbytes` bytes, a constant, that live until the function returns."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None
    length = nbytes.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), length))
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.intp(nbytes), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Hint to the CPU that this is a spin loop (a no-op on machines without such a hint)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _PAUSE is not None:
            name, values = _PAUSE
            i32 = ir.IntType(32)
            function_type = ir.FunctionType(ir.VoidType(), [i32] * len(values))
            function = cgutils.get_or_insert_function(builder.module, function_type, name)
            builder.call(function, [ir.Constant(i32, value) for value in values])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_reduce(
    typingctx: Any,
    function: Any,
    inputs: Any,
    n_inputs: Any,
    outputs: Any,
    n_outputs: Any,
    offset: Any,
    count: Any,
    divisor: Any,
) -> Any:
    """Call the reduction (see `reduce`) at the address `function` with the other arguments."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*([types.intp] * 8)), codegen


@intrinsic
def half_to_float(typingctx: Any, bits: Any) -> Any:
    """Widen float16 (as uint16 bits) to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return half.widen(context, builder, args[0])

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typingctx: Any, value: Any) -> Any:
    """Round float32 to float16 (as uint16 bits), to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return half.narrow(context, builder, args[0])

    return types.uint16(types.float32), codegen


# float16 elements per vector in `fuse_halves`. 8 are 5 % faster within the caches, but beyond them (64 MiB) took three
# times as long in every second start.
HALVES = 16


@intrinsic(prefer_literal=True)
def fuse_halves(typingctx: Any, operation: Any, a: Any, b: Any, target: Any, other_target: Any, divisor: Any) -> Any:
    """Combine HALVES float16 at the address `a` with those at `b` in float32, and store the result at both targets.

    The divisor of a mean must be a power of two, because the multiplication by its reciprocal is then exact, and
    faster. This is written by hand, because LLVM's loops take a fifth longer: they join two results for a store of 64
    bytes.
    """
    if not isinstance(operation, types.StringLiteral):
        return None
    name = operation.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves, floats = ir.VectorType(ir.IntType(16), HALVES), ir.VectorType(ir.FloatType(), HALVES)
        addresses = [builder.inttoptr(address, halves.as_pointer()) for address in args[1:5]]
        x, y = (half.widen(context, builder, builder.load(address, align=2)) for address in addresses[:2])
        if name in ("min", "max"):  # NaN wins from either operand
            first = builder.fcmp_ordered("<=" if name == "min" else ">=", x, y)
            result = builder.select(builder.or_(first, builder.fcmp_unordered("uno", x, x)), x, y)
        else:
            result = builder.fmul(x, y) if name == "prod" else builder.fadd(x, y)
        if name == "mean":
            number = builder.fdiv(ir.Constant(ir.FloatType(), 1.0), builder.sitofp(args[5], ir.FloatType()))
            vector = builder.insert_element(ir.Constant(floats, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), HALVES), None)
            result = builder.fmul(result, builder.shuffle_vector(vector, vector, zeros))
        # Without this fence, LLVM would convert once for each store, with the slow form of the instruction. It is not a
        # memory fence: it only hides the origin of a value.
        opaque = ir.VectorType(ir.FloatType(), HALVES // 2)
        fence = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(opaque, [opaque]), f"llvm.arithmetic.fence.v{HALVES // 2}f32"
        )
        rounded = builder.call(fence, [builder.bitcast(half.narrow(context, builder, result), opaque)])
        for address in addresses[2:]:
            builder.store(rounded, builder.bitcast(address, opaque.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(operation, *([types.intp] * 5)), codegen


@intrinsic
def float_bits(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx: Any, bits: Any) -> Any:
    """Return the float32 with the bits of a uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def bfloat_to_float(bits: int) -> Any:
    """Widen bfloat16 (as uint16 bits) to float32."""
    return bits_float(nb.uint32(nb.uint32(bits) << nb.uint32(16)))


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def round_to_bfloat(value: float) -> Any:
    """Return the bits of a float32 rounded to bfloat16, to nearest even, in the upper half (the lower half is garbage).

    For results of arithmetic on bfloat16. Their NaNs come from an operand or from the CPU, so their lower half is zero,
    and rounding cannot turn them into infinity. They need no special case.
    """
    bits = float_bits(value)
    return nb.uint32(bits + nb.uint32(0x7FFF) + ((bits >> nb.uint32(16)) & nb.uint32(1)))


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def float_to_bfloat(value: float) -> Any:
    """Round the result of arithmetic on bfloat16 to bfloat16 (as uint16 bits); see `round_to_bfloat`."""
    return nb.uint16(round_to_bfloat(value) >> nb.uint32(16))
