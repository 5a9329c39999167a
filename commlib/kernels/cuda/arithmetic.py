"""Arithmetic: reductions, conversions and the small loops that every path needs, on a GPU. See `kernels.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.dtypes import FLOATS, NUMPY, Array, name_of
from commlib.errors import UsageError
from commlib.kernels.cuda.arguments import at, f32, u32, u64
from commlib.kernels.cuda.launcher import Launcher

# Bytes that a worker has at once: a load of 16 bytes in each lane.
_STEP = 32 * 16

# Addresses that a reduction has as an argument, and how many one launch can write for it where it needs more.
_NEAR, _WRITTEN = 32, 480
_Near, _Addresses = np.dtype([("at", "u8", _NEAR)]), np.dtype([("at", "u8", _WRITTEN)])

# Arrays that one launch packs (arguments of a launch have at most 4 KiB), and the bytes that a worker copies of one.
_ARRAYS, _ITEM = 200, 4096
_Arrays = np.dtype([("at", "u8", _ARRAYS), ("ends", "u8", _ARRAYS), ("items", "u4", _ARRAYS)])

# A sum is kept of so many elements, or of a multiple of them such that there are at most so many sums; a worker adds up
# so many of those, until one is left.
_SPAN, _SUMS, _SUMS_OF_SUMS = 2048, 8192, 256


def reduce(launcher: Launcher, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
    """target = the first (operation) the second ..., in this order; the target may be one of them."""
    reduce_to(launcher, dtype, operation, divisor, operands, [target])


def reduce_to(
    launcher: Launcher, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
) -> None:
    """Write what `reduce` computes to each of several arrays, in the same pass; they may be among the operands.

    However many operands there are, one pass combines them: float16 is rounded once, and a target may be any operand.
    """
    count = len(targets[0])
    if count == 0:
        return
    addresses = np.array([at(array) for array in (*operands, *targets)], np.uint64)
    near = np.zeros((), _Near)
    near["at"][: len(addresses)] = addresses[:_NEAR]
    far = _on_device(launcher, addresses[_NEAR:])
    defines = {"ELEMENT": dtype.capitalize(), "OPERATION": operation.capitalize(), "NEAR": _NEAR}
    numbers = u32(len(operands)), u32(len(targets)), u64(count), np.int64(divisor)
    launcher.launch("reduce.cu", "reduce", defines, _steps(count * NUMPY[dtype].itemsize), near, at(far), *numbers)


def cast(launcher: Launcher, source: Any, target: Any) -> None:
    """Convert real numbers to the target's dtype, rounding to nearest even; what is too large becomes infinite."""
    defines = {"SOURCE": _element(source), "TARGET": _element(target)}
    workers = _steps(max(source.nbytes, target.nbytes))
    launcher.launch("cast.cu", "cast", defines, workers, at(source), at(target), u64(len(target)))


def fill(launcher: Launcher, target: Any, value: int) -> None:
    """Write a small whole number to all elements."""
    width = target.dtype.itemsize
    element = np.array([value], target.dtype)
    if width < 16:
        element = element.view(f"u{width}")
    defines = {"ELEMENT": f"u{8 * width}" if width < 16 else "Complex128"}
    launcher.launch("fill.cu", "fill", defines, _steps(target.nbytes), at(target), u64(len(target)), element[0])


def scale(launcher: Launcher, target: Any, factor: float) -> None:
    """Multiply all elements by a number, rounded to their dtype first."""
    element = np.asarray(target.dtype.type(factor))
    if target.dtype == NUMPY["bfloat16"]:
        element = element.view(np.uint16)  # bits, for a launcher that knows no bfloat16
    arguments = at(target), u64(len(target)), element[()]
    launcher.launch("scale.cu", "scale", {"ELEMENT": _element(target)}, _steps(target.nbytes), *arguments)


def pack(launcher: Launcher, sources: Sequence[Any], target: Any) -> None:
    """Copy arrays one after another to `target` (uint8)."""
    _copy(launcher, "pack", sources, target)


def unpack(launcher: Launcher, source: Any, targets: Sequence[Any]) -> None:
    """Undo `pack`."""
    _copy(launcher, "unpack", targets, source)


def squares(launcher: Launcher, x: Any) -> float:
    """Return the sum of squares of floats, in float64. The order of additions is fixed, but not the host's.

    Raises UsageError for other dtypes.
    """
    if name_of(x.dtype) not in FLOATS:
        raise UsageError(f"squares: expected an array of floats, got {name_of(x.dtype)}")
    if len(x) == 0:
        return 0.0
    of, count, span, square = x, len(x), -(-len(x) // (_SPAN * _SUMS)) * _SPAN, 1
    while square or count > 1:
        sums = launcher.scratch(8 * -(-count // span)).view(np.float64)
        defines = {"ELEMENT": _element(of), "SQUARE": square}
        launcher.launch("squares.cu", "sum_spans", defines, len(sums), at(of), u64(count), u64(span), at(sums))
        of, count, span, square = sums, len(sums), _SUMS_OF_SUMS, 0
    return float(launcher.read(of, np.float64)[0])


def is_finite(launcher: Launcher, x: Any) -> bool:
    """Return whether no float32 is infinite or NaN."""
    found = launcher.scratch(4)
    fill(launcher, found, 0)
    launcher.launch("finite.cu", "find_not_finite", {}, _steps(x.nbytes), at(x), u64(len(x)), at(found))
    return not launcher.read(found, np.uint32)[0]


def add_momentum(
    launcher: Launcher, gradient: Any, u: Any, u_after: Any, scale: float, momentum: float, nesterov: bool
) -> None:
    """Replace a gradient (float32), times `scale`, by its sum with the momentum; `u_after` is what u becomes."""
    arguments = at(gradient), at(u), at(u_after), u64(len(gradient)), f32(scale), f32(momentum), u32(nesterov)
    launcher.launch("momentum.cu", "add_momentum", {}, _steps(gradient.nbytes), *arguments)


def _element(x: Any) -> str:
    """Return what elements.cuh calls an array's elements."""
    return name_of(x.dtype).capitalize()


def _steps(nbytes: int) -> int:
    """Return how many workers have something to do."""
    return -(-nbytes // _STEP)


def _on_device(launcher: Launcher, addresses: Array) -> Any:
    """Return a table of addresses in memory of the device, None if it is empty."""
    if len(addresses) == 0:
        return None
    table = launcher.scratch(addresses.nbytes)
    for first in range(0, len(addresses), _WRITTEN):
        some, given = addresses[first : first + _WRITTEN], np.zeros((), _Addresses)
        given["at"][: len(some)] = some
        arguments = given, at(table) + u64(8 * first), u64(len(some))
        workers = -(-len(some) // 32)
        launcher.launch("addresses.cu", "write_addresses", {"COUNT": _WRITTEN}, workers, *arguments)
    return table


def _copy(launcher: Launcher, kernel: str, arrays: Sequence[Any], packed: Any) -> None:
    """Copy arrays to one (pack) or back (unpack), as many in one launch as its arguments can name."""
    place, arrays = at(packed), [array for array in arrays if array.nbytes]
    for first in range(0, len(arrays), _ARRAYS):
        some, table = arrays[first : first + _ARRAYS], np.zeros((), _Arrays)
        number, lengths = len(some), np.array([array.nbytes for array in some], np.uint64)
        table["at"][:number] = [at(array) for array in some]
        table["ends"][:number] = np.cumsum(lengths)
        table["items"][:number] = np.cumsum((lengths + u64(_ITEM - 1)) // u64(_ITEM))
        defines = {"ARRAYS": _ARRAYS, "ITEM": _ITEM}
        launcher.launch("pack.cu", kernel, defines, int(table["items"][number - 1]), table, u32(number), place)
        place += table["ends"][number - 1]
