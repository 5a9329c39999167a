"""Half precision: convert float16 with CPU instructions, or with integer arithmetic on CPUs without them (x86-64-v2).

On such CPUs, LLVM would call a function of libgcc, which a process may not have loaded, and which older versions lack.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

_TRIAL = "define float @widen(half %x) {\n  %y = fpext half %x to float\n  ret float %y\n}\n"


def has_instructions(context: Any) -> bool:
    """Return whether the CPU that numba compiles for has conversion instructions. context: of the generated code."""
    triple, cpu, features = context.codegen().magic_tuple()
    return _has_instructions(triple, cpu, features)


@cache
def _has_instructions(triple: str, cpu: str, features: str) -> bool:
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    return "__" not in machine.emit_assembly(llvm.parse_assembly(_TRIAL))  # such as __extendhfsf2


def widen(context: Any, builder: Any, bits: Any) -> Any:
    """Return the float32 of float16, a scalar or a vector, given as 16-bit integers."""
    if has_instructions(context):
        return builder.fpext(builder.bitcast(bits, _like(bits, ir.HalfType())), _like(bits, ir.FloatType()))
    whole = builder.zext(bits, _like(bits, ir.IntType(32)))

    def number(value: int) -> Any:
        return _constant(whole, value)

    sign = builder.shl(builder.and_(whole, number(0x8000)), number(16))
    size = builder.shl(builder.and_(whole, number(0x7FFF)), number(13))
    floats = _like(bits, ir.FloatType())
    # The exponent is 112 too small. The multiplication by 2^112 also normalizes denormal numbers.
    scale = builder.bitcast(number((127 + 112) << 23), floats)
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, floats), scale), whole.type)
    infinite = builder.or_(size, number(0x7F800000))
    quiet = builder.or_(infinite, number(0x400000))
    special = builder.select(builder.icmp_unsigned(">", size, number(0x7C00 << 13)), quiet, infinite)
    is_finite = builder.icmp_unsigned("<", size, number(0x7C00 << 13))
    return builder.bitcast(builder.or_(sign, builder.select(is_finite, finite, special)), floats)


def narrow(context: Any, builder: Any, floats: Any) -> Any:
    """Return float32, a scalar or a vector, rounded to float16, to nearest even, as 16-bit integers."""
    if has_instructions(context):
        halves = builder.fptrunc(floats, _like(floats, ir.HalfType()))
        return builder.bitcast(halves, _like(floats, ir.IntType(16)))
    bits = builder.bitcast(floats, _like(floats, ir.IntType(32)))

    def number(value: int) -> Any:
        return _constant(bits, value)

    sign = builder.lshr(builder.and_(bits, number(0x80000000)), number(16))
    size = builder.and_(bits, number(0x7FFFFFFF))
    # Normal: reduce the exponent by 112. The cut-off bits round up from a half on, if the last kept bit is odd.
    odd = builder.and_(builder.lshr(size, number(13)), number(1))
    normal = builder.lshr(builder.add(builder.add(size, number(0xFFF - (112 << 23))), odd), number(13))
    # Below 2^-14: in the sum with 0.5, the last bit is that of float16, and the addition rounds.
    half = builder.bitcast(number(0x3F000000), floats.type)
    sums = builder.bitcast(builder.fadd(builder.bitcast(size, floats.type), half), bits.type)
    small = builder.sub(sums, number(0x3F000000))
    payload = builder.and_(builder.lshr(size, number(13)), number(0x3FF))
    is_nan = builder.icmp_unsigned(">", size, number(0x7F800000))
    large = builder.select(is_nan, builder.or_(payload, number(0x7E00)), number(0x7C00))
    result = builder.select(builder.icmp_unsigned("<", size, number(0x38800000)), small, normal)
    result = builder.select(builder.icmp_unsigned("<", size, number(0x47800000)), result, large)
    return builder.trunc(builder.or_(sign, result), _like(floats, ir.IntType(16)))


def _like(value: Any, element: Any) -> Any:
    """Return the type of a value of `element` with the same number of lanes."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constant(like: Any, value: int) -> Any:
    """Return an integer constant of another value's type, repeated in each lane of a vector."""
    number = value & 0xFFFFFFFF
    return ir.Constant(like.type, [number] * like.type.count if isinstance(like.type, ir.VectorType) else number)
