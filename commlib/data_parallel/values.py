"""Values: access a framework's gradients by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.dtypes import Array


class Values(Protocol):
    """Interface to a framework's gradients of one set of parameters, and to their slots in buckets."""

    accumulates: bool
    """Gradients keep their value after a reduction, and the next backward adds to them."""
    hint: str
    """Advice for the error where a gradient is ready twice in one backward."""

    def use(self, engine: BucketReducer, members: Sequence[Sequence[int]]) -> None:
        """Use the slots of `engine`, whose buckets have these `members`. Earlier slots stay valid while referenced."""
        ...

    def free(self) -> None:
        """Ensure that slots that are about to be written are no longer referenced: see `Slots.free`."""
        ...

    def exists(self, index: int) -> bool:
        """Return whether there is a gradient."""
        ...

    def put(self, index: int) -> None:
        """Copy a gradient into its slot."""
        ...

    def take(self, index: int) -> None:
        """Make the result in its slot the gradient."""
        ...

    def forget(self) -> None:
        """Drop the notes of `put`."""
        ...

    def hide(self, indices: Iterable[int]) -> None:
        """Detach gradients from slots that are in flight: a mistaken accumulation now must not write to them."""
        ...

    def detach(self) -> None:
        """Copy each gradient that is a view of its slot to memory of its own."""
        ...

    def scale(self, index: int, factor: float) -> None:
        """Multiply a gradient in place."""
        ...

    # Gradients that travel outside the buckets

    def sparse_dimensions(self, index: int) -> int | None:
        """Return the number of sparse dimensions of a gradient; None if it is dense or missing."""
        ...

    def make_sparse(self, index: int, dimensions: int = 1) -> None:
        """Convert a dense gradient to a sparse one with this number of sparse dimensions."""
        ...

    def make_dense(self, index: int) -> None:
        """Convert a sparse gradient to a dense one."""
        ...

    def rows(self, index: int, wire: str) -> tuple[Any, Any]:
        """Return (row numbers, int64; row values as `wire`) of a sparse gradient, on the gradient's device."""
        ...

    def take_rows(self, index: int, numbers: Any, rows: Any, divisor: int) -> None:
        """Make rows the gradient, divided by `divisor`. Repeated row numbers are added up."""
        ...

    def compress(self, index: int) -> Array:
        """Return the user's compressed form of a gradient, or of zeros if there is none."""
        ...

    def decompress(self, index: int, array: Array) -> None:
        """Decompress a reduced array with the user's compressor, and make the result the gradient."""
        ...
