"""HostKernels: the compiled host kernels as the table that every device has. See `kernels.protocol`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.kernels.host import convert, draw, low_rank, orthonormal, quantise, signs, sparse, sparsify
from commlib.kernels.host import rows as row_kernels
from commlib.kernels.norm import sum_of_squares
from commlib.kernels.protocol import BlockLayout, Code, Fault, Kernels, Value
from commlib.kernels.reductions import reduction

# The numeric codes of the compiled functions.
_CODES: dict[Code, int] = {
    "int8": quantise.INT8,
    "int4": quantise.INT4,
    "e4m3": quantise.E4M3,
    "e5m2": quantise.E5M2,
}
VALUES: dict[Value, int] = {"float32": sparse.FLOAT32, "float16": sparse.FLOAT16, "bfloat16": sparse.BFLOAT16}
_FAULTS: dict[int, Fault] = {
    0: "",
    sparse.TOO_SHORT: "too short",
    sparse.OUTSIDE: "outside",
    sparse.OTHER_KIND: "other kind",
}


def _at(x: Any) -> int:
    """Return the address of an array; 0 for None."""
    if x is None:
        return 0
    return address_of(x) if isinstance(x, np.ndarray) else int(x.address)


def _numpy(x: Any) -> Array:
    """Return a host-readable array as a numpy array."""
    if isinstance(x, np.ndarray):
        return x
    pool = (ctypes.c_uint8 * max(x.nbytes, 1)).from_address(x.address or ctypes.addressof(_NOTHING))
    return np.frombuffer(pool, np.uint8)[: x.nbytes].view(x.dtype)


_NOTHING = ctypes.c_uint8(0)


class HostKernels(Kernels):
    """The kernels of the host. They read and write any memory that the host can address."""

    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        self.reduce_to(dtype, operation, divisor, operands, [target])

    def reduce_to(
        self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        function = reduction(dtype, operation).call
        inputs = np.array([_at(operand) for operand in operands], np.int64)
        outputs = np.array([_at(target) for target in targets], np.int64)
        function(address_of(inputs), len(inputs), address_of(outputs), len(outputs), 0, len(targets[0]), divisor)

    def cast(self, source: Any, target: Any) -> None:
        wide, narrow = _numpy(source), _numpy(target)
        # Rounding to a narrow float overflows to infinity by design, so numpy must not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            narrow[...] = wide.astype(narrow.dtype)

    def fill(self, target: Any, value: int) -> None:
        _numpy(target)[...] = value

    def scale(self, target: Any, factor: float) -> None:
        values = _numpy(target)
        np.multiply(values, values.dtype.type(factor), out=values)

    def pack(self, sources: Sequence[Any], target: Any) -> None:
        at = _at(target)
        for source in sources:
            ctypes.memmove(at, _at(source), source.nbytes)
            at += source.nbytes

    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        at = _at(source)
        for target in targets:
            ctypes.memmove(_at(target), at, target.nbytes)
            at += target.nbytes

    def squares(self, x: Any) -> float:
        return sum_of_squares(_numpy(x))

    def is_finite(self, x: Any) -> bool:
        values = _numpy(x)
        with np.errstate(all="ignore"):
            if np.isfinite(values.sum(dtype=np.float32)):  # one pass over the memory, without a temporary array
                return True
        return bool(np.isfinite(values).all())  # a sum of finite values may overflow

    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        if before is None:
            convert.narrow(_at(x), _at(payload), len(x), bfloat)
        else:
            convert.narrow_sum(_at(x), _at(before), _at(after), _at(payload), len(x), bfloat)

    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        convert.widen(_at(payload), _at(out), len(out), bfloat, add)

    def quantise(
        self,
        x: Any,
        before: Any,
        after: Any,
        payload: Any,
        block: int,
        code: Code,
        top: float,
        by_norm: bool,
        at_random: bool,
        seed: int,
    ) -> None:
        addresses = _at(x), _at(before), _at(after), _at(payload)
        quantise.encode(*addresses, len(x), block, _CODES[code], top, by_norm, at_random, seed)

    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        quantise.decode(_at(payload), _at(out), len(out), block, _CODES[code], add)

    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        signs.encode(_at(x), _at(before), _at(after), _at(payload), len(x), block)

    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        signs.decode(_at(payload), _at(out), len(out), block, add)

    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        return int(sparsify.encode_largest(_at(x), _at(before), _at(after), len(x), k, VALUES[value], _at(payload)))

    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        return int(draw.encode_random(_at(x), _at(before), _at(after), len(x), k, seed, scale, _at(payload)))

    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        return _FAULTS[sparse.read(_at(payload), len(payload), VALUES[value], _at(out), len(out), add)]

    def draw(self, count: int, seed: int, places: Any) -> None:
        draw.draw(count, seed, _numpy(places))

    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        draw.take(_at(x), _at(before), _at(after), len(x), _numpy(places), scale, _numpy(values))

    def place(self, values: Any, places: Any, out: Any) -> None:
        _numpy(out)[_numpy(places)] = _numpy(values)

    def copy_blocks(self, source: Any, target: Any, blocks: BlockLayout) -> None:
        item = source.itemsize

        def lying(array: Any, row: int, column: int) -> Any:
            shape = blocks.rows, blocks.columns, blocks.run
            strides = row * item, column * item, item
            return np.lib.stride_tricks.as_strided(_numpy(array), shape, strides)

        lying(target, blocks.to_row, blocks.to_column)[...] = lying(source, blocks.from_row, blocks.from_column)

    def take_rows(self, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
        starts = np.arange(len(places) + 1, dtype=np.int32)
        self.sum_rows(here, there, factors, starts, places, width, target)

    def sum_rows(self, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any) -> None:
        numbers, item = _numpy(places).astype(np.int64), width * target.itemsize
        is_here = numbers < 0
        addresses = np.where(is_here, _at(here) + ~numbers * item, _at(there) + numbers * item)
        by = np.ones(len(numbers), np.float32)
        if factors is not None:
            by[is_here] = _numpy(factors)[~numbers[is_here]]
        slots = np.arange(len(numbers), dtype=np.int32)
        row_kernels.sum_rows(_numpy(target).reshape(len(starts) - 1, width), _numpy(starts), slots, addresses, by)

    def multiply_rows(self, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any) -> None:
        one, other, to = (_numpy(array).reshape(len(factors), width) for array in (rows, others, scaled))
        row_kernels.multiply_rows(one, other, _numpy(factors), to, _numpy(products))

    def add_momentum(self, gradient: Any, u: Any, u_after: Any, scale: float, momentum: float, nesterov: bool) -> None:
        g, old, decay = _numpy(gradient), _numpy(u), np.float32(momentum)
        with np.errstate(all="ignore"):
            scaled = g * np.float32(scale)
            new = decay * (old + scaled) if nesterov else decay * old + scaled
            g[:] = new + scaled if nesterov else new
        _numpy(u_after)[:] = np.where(np.isfinite(new), new, old)

    def accumulate(
        self,
        gradient: Any,
        u: Any,
        v: Any,
        u_after: Any,
        v_after: Any,
        scale: float,
        momentum: float,
        nesterov: bool,
        k: int,
        value: Value,
        payload: Any,
    ) -> int:
        arrays = map(_at, (gradient, u, v, u_after, v_after))
        how = scale, momentum, nesterov, k, VALUES[value]
        return int(sparsify.encode_accumulated(*arrays, len(gradient), *how, _at(payload)))

    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        return int(orthonormal.orthonormalise(_numpy(vectors), rank, epsilon))

    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        low_rank.project(_numpy(matrix), _numpy(before), rows, cols, _numpy(right), _numpy(left), rank)

    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        low_rank.project_back(_numpy(matrix), rows, cols, _numpy(left), _numpy(right), rank)

    def expand(
        self, matrix: Any, after: Any, rows: int, cols: int, left: Any, right: Any, own_right: Any, rank: int
    ) -> None:
        factors = _numpy(left), _numpy(right), _numpy(own_right)
        low_rank.expand(_numpy(matrix), _numpy(after), rows, cols, *factors, rank)
