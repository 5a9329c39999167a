"""Kernels of the late device: the host's, queued on its streams."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from commlib.devices.array import DeviceArray
from commlib.kernels.host.table import HostKernels
from commlib.kernels.protocol import BlockLayout, Code, Fault, Value

if TYPE_CHECKING:
    from tests.late.device import LateDevice


class LateKernels:
    """The host's kernels, late. See `kernels.protocol.Kernels`."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._host = weakref.ref(device), HostKernels()

    def _queue(self, writes: Sequence[Any], reads: Sequence[Any], run: Callable[[], Any], whole: bool = False) -> None:
        device = self._device()
        assert device is not None
        device.submit(_present(writes), _present(reads), run, whole=whole)

    def _now(self, writes: Sequence[Any], reads: Sequence[Any], run: Callable[[], Any]) -> Any:
        results: list[Any] = []
        self._queue(writes, reads, lambda: results.append(run()))
        device = self._device()
        assert device is not None
        device.synchronise()
        assert results, "what a kernel reads changed while it ran"
        return results[0]

    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        whole = all(operand.address != target.address for operand in operands)
        bare, to = [_bare(operand) for operand in operands], _bare(target)
        self._queue([target], operands, lambda: self._host.reduce(dtype, operation, divisor, bare, to), whole)

    def reduce_to(
        self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        whole = not {operand.address for operand in operands} & {target.address for target in targets}
        bare, to = [_bare(operand) for operand in operands], [_bare(target) for target in targets]
        self._queue(targets, operands, lambda: self._host.reduce_to(dtype, operation, divisor, bare, to), whole)

    def cast(self, source: Any, target: Any) -> None:
        bare, to = _bare(source), _bare(target)
        self._queue([target], [source], lambda: self._host.cast(bare, to), True)

    def fill(self, target: Any, value: int) -> None:
        to = _bare(target)
        self._queue([target], [], lambda: self._host.fill(to, value), True)

    def scale(self, target: Any, factor: float) -> None:
        to = _bare(target)
        self._queue([target], [], lambda: self._host.scale(to, factor))

    def pack(self, sources: Sequence[Any], target: Any) -> None:
        bare, to = [_bare(source) for source in sources], _bare(target)
        self._queue([target], sources, lambda: self._host.pack(bare, to))

    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        bare, to = _bare(source), [_bare(target) for target in targets]
        self._queue(targets, [source], lambda: self._host.unpack(bare, to), True)

    def squares(self, x: Any) -> float:
        return float(self._now([], [x], lambda: self._host.squares(x)))

    def is_finite(self, x: Any) -> bool:
        return bool(self._now([], [x], lambda: self._host.is_finite(x)))

    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        a = _bare(x), _bare(before), _bare(after), _bare(payload)
        self._queue([payload, after], [x, before], lambda: self._host.narrow(*a, bfloat))

    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        a = _bare(payload), _bare(out)
        self._queue([out], [payload], lambda: self._host.widen(*a, bfloat, add), not add)

    def quantise(self, x: Any, before: Any, after: Any, payload: Any, *options: Any) -> None:
        a = _bare(x), _bare(before), _bare(after), _bare(payload)
        self._queue([payload, after], [x, before], lambda: self._host.quantise(*a, *options))

    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        a = _bare(payload), _bare(out)
        self._queue([out], [payload], lambda: self._host.restore(*a, block, code, add), not add)

    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        a = _bare(x), _bare(before), _bare(after), _bare(payload)
        self._queue([payload, after], [x, before], lambda: self._host.signs(*a, block))

    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        a = _bare(payload), _bare(out)
        self._queue([out], [payload], lambda: self._host.unsign(*a, block, add), not add)

    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        run = lambda: self._host.largest(x, before, after, k, value, payload)  # noqa: E731
        return int(self._now([payload, after], [x, before], run))

    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        run = lambda: self._host.random(x, before, after, k, seed, scale, payload)  # noqa: E731
        return int(self._now([payload, after], [x, before], run))

    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        fault: Fault = self._now([out], [payload], lambda: self._host.read_sparse(payload, value, out, add))
        return fault

    def draw(self, count: int, seed: int, places: Any) -> None:
        to = _bare(places)
        self._queue([places], [], lambda: self._host.draw(count, seed, to), True)

    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        a, at, to = (_bare(x), _bare(before), _bare(after)), _bare(places), _bare(values)
        self._queue([values, after], [x, before, places], lambda: self._host.take(*a, at, scale, to))

    def place(self, values: Any, places: Any, out: Any) -> None:
        a, at, to = _bare(values), _bare(places), _bare(out)
        self._queue([out], [values, places], lambda: self._host.place(a, at, to))

    def copy_blocks(self, source: Any, target: Any, blocks: BlockLayout) -> None:
        a, to = _bare(source), _bare(target)
        self._queue([target], [source], lambda: self._host.copy_blocks(a, to, blocks))

    def take_rows(self, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
        a = _bare(here), _bare(there), _bare(factors), _bare(places)
        to = _bare(target)
        run = lambda: self._host.take_rows(*a, width, to)  # noqa: E731
        self._queue([target], [here, there, factors, places], run, True)

    def sum_rows(self, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any) -> None:
        a = _bare(here), _bare(there), _bare(factors), _bare(starts), _bare(places)
        to = _bare(target)
        run = lambda: self._host.sum_rows(*a, width, to)  # noqa: E731
        self._queue([target], [here, there, factors, starts, places], run, True)

    def multiply_rows(self, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any) -> None:
        a, to = (_bare(rows), _bare(others), _bare(factors)), (_bare(scaled), _bare(products))
        run = lambda: self._host.multiply_rows(*a, width, *to)  # noqa: E731
        self._queue([scaled, products], [rows, others, factors], run, scaled.address != rows.address)

    def add_momentum(self, gradient: Any, u: Any, u_after: Any, *how: Any) -> None:
        a = [_bare(array) for array in (gradient, u, u_after)]
        self._queue([gradient, u_after], [u], lambda: self._host.add_momentum(*a, *how))

    def accumulate(self, gradient: Any, u: Any, v: Any, u_after: Any, v_after: Any, *how_and_payload: Any) -> int:
        run = lambda: self._host.accumulate(gradient, u, v, u_after, v_after, *how_and_payload)  # noqa: E731
        return int(self._now([u_after, v_after, how_and_payload[-1]], [gradient, u, v], run))

    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        return int(self._now([vectors], [], lambda: self._host.orthonormalise(vectors, rank, epsilon)))

    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        m, b, r, to = map(_bare, (matrix, before, right, left))
        self._queue([matrix, left], [before, right], lambda: self._host.project(m, b, rows, cols, r, to, rank))

    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        m, own, to = map(_bare, (matrix, left, right))
        run = lambda: self._host.project_back(m, rows, cols, own, to, rank)  # noqa: E731
        self._queue([right], [matrix, left], run, True)

    def expand(self, matrix: Any, after: Any, rows: int, cols: int, *factors_and_rank: Any) -> None:
        *factors, rank = factors_and_rank
        m, a, (left, right, own) = _bare(matrix), _bare(after), map(_bare, factors)
        run = lambda: self._host.expand(m, a, rows, cols, left, right, own, rank)  # noqa: E731
        self._queue([matrix, after], factors, run)


def _present(arrays: Sequence[Any]) -> list[Any]:
    return [array for array in arrays if array is not None]


def _bare(array: Any) -> Any:
    """Return the array without the owner of its memory: a real device has addresses only."""
    if array is None:
        return None
    return DeviceArray(array.device, array.address, array.shape, array.dtype, None, array.stream)
