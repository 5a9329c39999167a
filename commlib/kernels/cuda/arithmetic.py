"""Arithmetic on a GPU: reductions, conversions and small loops that every path needs. See `kernels.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.dtypes import FLOATS, NUMPY, Array, name_of
from commlib.errors import UsageError
from commlib.kernels.cuda.arguments import f32, pointer_to, u32, u64
from commlib.kernels.cuda.launcher import LaunchedKernels

# Bytes that a worker processes at once: a load of 16 bytes in each lane.
_STEP = 32 * 16

# Number of addresses in the arguments of a reduction, and number that one launch writes to device memory for longer
# lists.
_NEAR, _WRITTEN = 32, 480
_Near, _Addresses = np.dtype([("at", "u8", _NEAR)]), np.dtype([("at", "u8", _WRITTEN)])

# Number of arrays that one launch packs (its arguments have at most 4 KiB), and bytes per copied item.
_ARRAYS, _ITEM = 200, 4096
_Arrays = np.dtype([("at", "u8", _ARRAYS), ("ends", "u8", _ARRAYS), ("items", "u4", _ARRAYS)])

# Elements per partial sum: this number, or a multiple that limits the number of sums. A worker adds up this many sums,
# in further passes until one is left.
_SPAN, _SUMS, _SUMS_OF_SUMS = 2048, 8192, 256


class ArithmeticKernels(LaunchedKernels):
    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        self.reduce_to(dtype, operation, divisor, operands, [target])

    def reduce_to(
        self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        # One pass combines any number of operands: float16 is rounded once, and a target may be any operand.
        count = len(targets[0])
        if count == 0:
            return
        addresses = np.array([pointer_to(array) for array in (*operands, *targets)], np.uint64)
        near = np.zeros((), _Near)
        near["at"][: len(addresses)] = addresses[:_NEAR]
        far = self._on_device(addresses[_NEAR:])
        defines = {"ELEMENT": dtype.capitalize(), "OPERATION": operation.capitalize(), "NEAR": _NEAR}
        numbers = u32(len(operands)), u32(len(targets)), u64(count), np.int64(divisor)
        self._launch(
            "reduce.cu", "reduce", defines, _steps(count * NUMPY[dtype].itemsize), near, pointer_to(far), *numbers
        )

    def cast(self, source: Any, target: Any) -> None:
        defines = {"SOURCE": _element(source), "TARGET": _element(target)}
        workers = _steps(max(source.nbytes, target.nbytes))
        self._launch("cast.cu", "cast", defines, workers, pointer_to(source), pointer_to(target), u64(len(target)))

    def fill(self, target: Any, value: int) -> None:
        width = target.dtype.itemsize
        element = np.array([value], target.dtype)
        if width < 16:
            element = element.view(f"u{width}")
        defines = {"ELEMENT": f"u{8 * width}" if width < 16 else "Complex128"}
        self._launch(
            "fill.cu", "fill", defines, _steps(target.nbytes), pointer_to(target), u64(len(target)), element[0]
        )

    def scale(self, target: Any, factor: float) -> None:
        element = np.asarray(target.dtype.type(factor))
        if target.dtype == NUMPY["bfloat16"]:
            element = element.view(np.uint16)  # bits, because launchers have no bfloat16
        arguments = pointer_to(target), u64(len(target)), element[()]
        self._launch("scale.cu", "scale", {"ELEMENT": _element(target)}, _steps(target.nbytes), *arguments)

    def pack(self, sources: Sequence[Any], target: Any) -> None:
        self._copy("pack", sources, target)

    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        self._copy("unpack", targets, source)

    def squares(self, x: Any) -> float:
        # In float64. The order of additions is fixed, but differs from the host's.
        if name_of(x.dtype) not in FLOATS:
            raise UsageError(f"squares: expected an array of floats, got {name_of(x.dtype)}")
        if len(x) == 0:
            return 0.0
        of, count, span, square = x, len(x), -(-len(x) // (_SPAN * _SUMS)) * _SPAN, 1
        while square or count > 1:
            sums = self._scratch(8 * -(-count // span)).view(np.float64)
            defines = {"ELEMENT": _element(of), "SQUARE": square}
            self._launch(
                "squares.cu", "sum_spans", defines, len(sums), pointer_to(of), u64(count), u64(span), pointer_to(sums)
            )
            of, count, span, square = sums, len(sums), _SUMS_OF_SUMS, 0
        return float(self._read(of, np.float64)[0])

    def is_finite(self, x: Any) -> bool:
        result = self._scratch(4)
        self.fill(result, 0)
        self._launch(
            "finite.cu", "find_not_finite", {}, _steps(x.nbytes), pointer_to(x), u64(len(x)), pointer_to(result)
        )
        return not self._read(result, np.uint32)[0]

    def add_momentum(self, gradient: Any, u: Any, u_after: Any, scale: float, momentum: float, nesterov: bool) -> None:
        arguments = (
            pointer_to(gradient),
            pointer_to(u),
            pointer_to(u_after),
            u64(len(gradient)),
            f32(scale),
            f32(momentum),
            u32(nesterov),
        )
        self._launch("momentum.cu", "add_momentum", {}, _steps(gradient.nbytes), *arguments)

    def _on_device(self, addresses: Array) -> Any:
        """Return a table of addresses in device memory; None if it is empty."""
        if len(addresses) == 0:
            return None
        table = self._scratch(addresses.nbytes)
        for first in range(0, len(addresses), _WRITTEN):
            some, given = addresses[first : first + _WRITTEN], np.zeros((), _Addresses)
            given["at"][: len(some)] = some
            arguments = given, pointer_to(table) + u64(8 * first), u64(len(some))
            workers = -(-len(some) // 32)
            self._launch("addresses.cu", "write_addresses", {"COUNT": _WRITTEN}, workers, *arguments)
        return table

    def _copy(self, kernel: str, arrays: Sequence[Any], packed: Any) -> None:
        """Copy arrays to one (pack) or back (unpack), in launches of as many arrays as the arguments can hold."""
        place, arrays = pointer_to(packed), [array for array in arrays if array.nbytes]
        for first in range(0, len(arrays), _ARRAYS):
            some, table = arrays[first : first + _ARRAYS], np.zeros((), _Arrays)
            number, lengths = len(some), np.array([array.nbytes for array in some], np.uint64)
            table["at"][:number] = [pointer_to(array) for array in some]
            table["ends"][:number] = np.cumsum(lengths)
            table["items"][:number] = np.cumsum((lengths + u64(_ITEM - 1)) // u64(_ITEM))
            defines = {"ARRAYS": _ARRAYS, "ITEM": _ITEM}
            self._launch("pack.cu", kernel, defines, int(table["items"][number - 1]), table, u32(number), place)
            place += table["ends"][number - 1]


def _element(x: Any) -> str:
    """Return the name of an array's element type in elements.cuh."""
    return name_of(x.dtype).capitalize()


def _steps(nbytes: int) -> int:
    """Return the number of workers with work to do."""
    return -(-nbytes // _STEP)
