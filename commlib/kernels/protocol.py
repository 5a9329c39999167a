"""Kernels: what a device computes, on arrays of its own memory. Each device has one such table.

Arrays are contiguous and 1-D: numpy's on the host, DeviceArray elsewhere; only their addresses and lengths count. All
calls are queued on the current stream but those that return a number, which wait for it. `before` and `after` are the
residuals of error feedback, None without; `after` may be `before`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

Code = Literal["int8", "int4", "e4m3", "e5m2"]
"""A quantised value: an integer of 8 or 4 bits, a float with 4 bits of exponent and 3 of mantissa, or 5 and 2."""

Value = str
"""How the values of a sparse payload travel: "float32", "float16" or "bfloat16"."""

Fault = Literal["", "too short", "outside", "other kind"]
"""What is wrong with a sparse payload: nothing; it is cut off, of a longer array, or written by another codec."""

SPARSE_HEADER = 8  # bytes that every sparse payload has


class Blocks(NamedTuple):
    """Say where rows x columns of runs lie in two arrays: how many elements apart, from either's first one on."""

    rows: int
    columns: int
    run: int
    from_row: int
    from_column: int
    to_row: int
    to_column: int


class Kernels(Protocol):
    """One device's kernels."""

    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        """target = the first (operation) the second ..., in this order; the target may be one of them."""
        ...

    def reduce_to(
        self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        """Write the same to several targets, which other devices may have; they may be among the operands."""
        ...

    def cast(self, source: Any, target: Any) -> None:
        """Convert numbers to the target's dtype, rounding to nearest even; what is too large becomes infinite."""
        ...

    def fill(self, target: Any, value: int) -> None:
        """Write a small whole number to all elements."""
        ...

    def scale(self, target: Any, factor: float) -> None:
        """Multiply all elements by a number, rounded to their dtype first."""
        ...

    def pack(self, sources: Sequence[Any], target: Any) -> None:
        """Copy arrays one after another to `target` (uint8)."""
        ...

    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        """Undo `pack`."""
        ...

    def squares(self, x: Any) -> float:
        """Return the sum of squares of floats."""
        ...

    def is_finite(self, x: Any) -> bool:
        """Return whether no float32 is infinite or NaN."""
        ...

    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        """Round float32 to float16 or bfloat16."""
        ...

    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        """Write float16 or bfloat16 as float32, or add them."""
        ...

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
        """Write float32 as codes, multiples of a unit that each block has; `top` is the greatest code."""
        ...

    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        """Write what `quantise` has written as float32, or add it."""
        ...

    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        """Write the signs of float32, and the mean magnitude of each block."""
        ...

    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        """Write what `signs` has written as float32, or add it."""
        ...

    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        """Write the k largest of float32 and where they are, and return how many bytes that took."""
        ...

    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        """Write k elements that `seed` chooses, and return how many bytes that took."""
        ...

    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        """Write what `largest` or `random` has written as float32, or add it; return what is wrong with it."""
        ...

    def draw(self, count: int, seed: int, places: Any) -> None:
        """Fill `places` (uint32) with the numbers below `count`, ascending, that `random` would choose by `seed`."""
        ...

    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        """Write what float32 have at the places to `values`, times `scale`; NaNs if one anywhere is not finite."""
        ...

    def place(self, values: Any, places: Any, out: Any) -> None:
        """Write float32 values to the places."""
        ...

    def copy_blocks(self, source: Any, target: Any, blocks: Blocks) -> None:
        """Copy blocks of elements of one dtype between arrays that do not overlap."""
        ...

    # Rows are of floats, and lie in two arrays: place p >= 0 (int32) is row p of `there`, another one row ~p of `here`,
    # times factors[~p] (float32; None: 1). Sums are made in float32 (float64 of float64), in the order of places, and
    # rounded once.

    def take_rows(self, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
        """Let row i of `target`, of `width` elements, be the one at places[i]."""
        ...

    def sum_rows(self, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any) -> None:
        """Let row t of `target` be the sum of those at places[starts[t] : starts[t + 1]], 0 if there are none."""
        ...

    def multiply_rows(self, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any) -> None:
        """Let `scaled`, which may be `rows`, be rows times factors (float32), and `products` (float32) the scalar
        product of each row with its other, added up as `commlib.kernels.host.rows` says."""
        ...

    def add_momentum(self, gradient: Any, u: Any, u_after: Any, scale: float, momentum: float, nesterov: bool) -> None:
        """Replace a gradient (float32), times `scale`, by its sum with the momentum; `u_after` is what u becomes."""
        ...

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
        """Do a step of Deep Gradient Compression (`commlib.compress.schemes.dgc`) on a parameter: write the k largest
        elements as `largest` does, and return how many bytes that took."""
        ...

    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        """Make float32 vectors orthonormal in place; return how many became zero, -1 if one is not finite."""
        ...

    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        """Add `before` to a matrix (unless it is empty), and write left = matrix right; see `kernels.host.low_rank`."""
        ...

    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        """Write right = matrix^T left."""
        ...

    def expand(
        self, matrix: Any, after: Any, rows: int, cols: int, left: Any, right: Any, own_right: Any, rank: int
    ) -> None:
        """Write after = matrix - left own_right^T (unless it is empty), then matrix = left right^T."""
        ...
