"""Values: ask a framework for its gradients, by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from commlib.data_parallel.engine import Engine
from commlib.dtypes import Array


class Values(Protocol):
    """Give a framework's gradients, of one set of parameters, and their slots in buckets."""

    accumulates: bool
    """Gradients stay what they are after a reduction, and the next backward adds to them."""
    hint: str
    """What to do where a gradient is ready twice in one backward."""

    def use(self, engine: Engine, members: Sequence[Sequence[int]]) -> None:
        """Take the slots of `engine`, whose buckets have these `members`. Earlier ones stay valid where held."""
        ...

    def free(self) -> None:
        """Make sure that slots which are about to be written are no longer referred to: see `Slots.free`."""
        ...

    def exists(self, index: int) -> bool:
        """Tell whether there is a gradient."""
        ...

    def put(self, index: int) -> None:
        """Bring a gradient into its slot."""
        ...

    def take(self, index: int) -> None:
        """Make what was reduced in its slot the gradient."""
        ...

    def forget(self) -> None:
        """Drop what `put` has noted."""
        ...

    def hide(self, indices: Iterable[int]) -> None:
        """Part gradients from slots that are in flight: a mistaken accumulation now must not write there."""
        ...

    def detach(self) -> None:
        """Give each gradient that lies in its slot memory of its own."""
        ...

    def scale(self, index: int, factor: float) -> None:
        """Multiply a gradient where it is."""
        ...

    # Gradients that travel outside the buckets

    def sparse_dimensions(self, index: int) -> int | None:
        """Return how many sparse dimensions a gradient has; None if it is dense, or not there."""
        ...

    def make_sparse(self, index: int, dimensions: int = 1) -> None:
        """Give a gradient that is dense so many sparse dimensions."""
        ...

    def make_dense(self, index: int) -> None:
        """Make a sparse gradient dense."""
        ...

    def rows(self, index: int, wire: str) -> tuple[Any, Any]:
        """Return (numbers of rows, int64; their values as `wire`) of a sparse gradient, on the gradient's device."""
        ...

    def take_rows(self, index: int, numbers: Any, rows: Any, divisor: int) -> None:
        """Make rows, which may come several times and are then added up, divided by `divisor` the gradient."""
        ...

    def compress(self, index: int) -> Array:
        """Return what the user's compressor sends for a gradient; of zeros if there is none."""
        ...

    def decompress(self, index: int, array: Array) -> None:
        """Make what the user's compressor makes of a reduced array the gradient."""
        ...
