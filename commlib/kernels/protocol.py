"""Kernels: the computations of a device, on arrays in its memory. Each device has one such table.

A kernel is declared here, once, and implemented in `host.table` and in one file of `cuda`.

Arrays are contiguous and 1-D: numpy arrays on the host, DeviceArrays elsewhere; only their addresses and lengths count.
All calls are queued on the current stream, except those that return a number, which wait for it. `before` and `after`
are the residuals of error feedback, or None; `after` may be `before`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

Code = Literal["int8", "int4", "e4m3", "e5m2"]
"""A quantized value: an integer of 8 or 4 bits, a float with 4 bits of exponent and 3 of mantissa, or 5 and 2."""

Value = str
"""The dtype of a sparse payload's values: "float32", "float16" or "bfloat16"."""

Fault = Literal["", "too short", "outside", "other kind"]
"""The fault in a sparse payload: none; truncated; from a longer array; or from another codec."""

SPARSE_HEADER = 8  # bytes at the beginning of every sparse payload


class BlockLayout(NamedTuple):
    """The layout of rows x columns of runs in two arrays, as distances in elements from the first element of each."""

    rows: int
    columns: int
    run: int
    from_row: int
    from_column: int
    to_row: int
    to_column: int


class Kernels(Protocol):
    """The kernels of one device. The tables of devices inherit it, so a table that lacks a kernel cannot be made."""

    @abstractmethod
    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        """target = the first (operation) the second ..., in this order; the target may be one of them."""

    @abstractmethod
    def reduce_to(
        self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        """Write the result of `reduce` to several targets, even of other devices; they may be among the operands."""

    @abstractmethod
    def cast(self, source: Any, target: Any) -> None:
        """Convert numbers to the target's dtype, to nearest even; values that are too large become infinite."""

    @abstractmethod
    def fill(self, target: Any, value: int) -> None:
        """Set all elements to a small integer."""

    @abstractmethod
    def scale(self, target: Any, factor: float) -> None:
        """Multiply all elements by a number, which is rounded to their dtype first."""

    @abstractmethod
    def pack(self, sources: Sequence[Any], target: Any) -> None:
        """Copy arrays to consecutive bytes of `target` (uint8)."""

    @abstractmethod
    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        """Copy consecutive bytes of `source` to arrays, the inverse of `pack`."""

    @abstractmethod
    def squares(self, x: Any) -> float:
        """Return the sum of squares of floats. Raises UsageError for other dtypes."""

    @abstractmethod
    def is_finite(self, x: Any) -> bool:
        """Return whether no float32 is infinite or NaN."""

    @abstractmethod
    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        """Round float32 to float16 or bfloat16."""

    @abstractmethod
    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        """Write float16 or bfloat16 values as float32, or add them."""

    @abstractmethod
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
        """Write float32 values as codes, which are multiples of a unit per block; `top` is the greatest code."""

    @abstractmethod
    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        """Decode the codes of `quantise` as float32, or add the values."""

    @abstractmethod
    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        """Write the signs of float32 values, and the mean magnitude of each block."""

    @abstractmethod
    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        """Decode the payload of `signs` as float32, or add the values."""

    @abstractmethod
    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        """Write the k largest float32 elements and their positions, and return the payload's length in bytes."""

    @abstractmethod
    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        """Write k elements that `seed` chooses, and return the payload's length in bytes."""

    @abstractmethod
    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        """Decode a payload of `largest` or `random` as float32, or add its values; return the fault in it."""

    @abstractmethod
    def draw(self, count: int, seed: int, places: Any) -> None:
        """Fill `places` (uint32) with the numbers below `count`, ascending, that `random` would choose for `seed`."""

    @abstractmethod
    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        """Write the float32 elements at the places to `values`, times `scale`; NaNs if any element is not finite."""

    @abstractmethod
    def place(self, values: Any, places: Any, out: Any) -> None:
        """Write float32 values to the places of `out`."""

    @abstractmethod
    def copy_blocks(self, source: Any, target: Any, blocks: BlockLayout) -> None:
        """Copy blocks of elements of one dtype between arrays that do not overlap."""

    # Rows of floats come from two arrays: place p >= 0 (int32) is row p of `there`, and p < 0 is row ~p of `here`,
    # times factors[~p] (float32; None: 1). Sums are taken in float32 (float64 for float64), in the order of places, and
    # rounded once.

    @abstractmethod
    def take_rows(self, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
        """Set row i of `target`, of `width` elements, to the row at places[i]."""

    @abstractmethod
    def sum_rows(self, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any) -> None:
        """Set row t of `target` to the sum of the rows at places[starts[t] : starts[t + 1]], 0 if there are none."""

    @abstractmethod
    def multiply_rows(self, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any) -> None:
        """Set `scaled` to rows times factors, and `products` to the dot product of each row with its counterpart.

        scaled: may be `rows`. factors, products: float32. Sums are in the order of `commlib.kernels.host.rows`.
        """

    @abstractmethod
    def add_momentum(self, gradient: Any, u: Any, u_after: Any, scale: float, momentum: float, nesterov: bool) -> None:
        """Replace a gradient (float32), times `scale`, by its sum with the momentum; `u_after` gets the momentum."""

    @abstractmethod
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
        """Run a step of Deep Gradient Compression on a parameter; return the payload's length in bytes.

        It writes the k largest elements as `largest` does. See `commlib.compress.schemes.dgc`.
        """

    @abstractmethod
    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        """Make float32 vectors orthonormal in place; return how many became zero, -1 if one is not finite."""

    @abstractmethod
    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        """Add `before` to a matrix (unless it is empty), and write left = matrix right; see `kernels.host.low_rank`."""

    @abstractmethod
    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        """Write right = matrix^T left."""

    @abstractmethod
    def expand(
        self, matrix: Any, after: Any, rows: int, cols: int, left: Any, right: Any, own_right: Any, rank: int
    ) -> None:
        """Write after = matrix - left own_right^T (unless it is empty), then matrix = left right^T."""
