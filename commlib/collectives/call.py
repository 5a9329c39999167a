"""Call: what all ranks must agree on when they call a verb."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from commlib.dtypes import name_of


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call of a verb.

    size: the elements of each rank's array, or its shape where dimension 0 matters; None if no data moves. op: of a
    reduction. root: -1 where there is none. algorithm: "auto", the name of a path, or that of a schedule; "" where
    there is no choice. rows: how many of them go to or come from each rank, where that is uneven and all know it.
    device: of the arrays, "" for the host. whole: the elements of the call that this is a piece of.
    """

    verb: str
    size: int | tuple[int, ...] | None
    dtype: Any
    op: str = ""
    root: int = -1
    algorithm: str = "auto"
    rows: tuple[int, ...] = ()
    device: str = ""
    whole: int = 0

    @property
    def text(self) -> str:
        """What ranks compare."""
        if self.size is None:
            return self.verb
        what = f"{self.size} x" if isinstance(self.size, int) else f"shape {self.size}"
        details = [f"{self.verb} of {what} {name_of(self.dtype)}"]
        details += [f"op={self.op}"] * bool(self.op)
        details += [f"rows={self.rows}"] * bool(self.rows)
        details += [f"root={self.root}"] * (self.root >= 0)
        details += [f"algorithm={self.algorithm}"] * bool(self.algorithm)
        details += [f"device={self.device}"] * bool(self.device)
        details += [f"a piece of {self.whole}"] * bool(self.whole)
        return ", ".join(details)

    @property
    def count(self) -> int:
        """The elements of each rank's array."""
        return self.size if isinstance(self.size, int) else math.prod((0,) if self.size is None else self.size)

    @property
    def nbytes(self) -> int:
        """The bytes of each rank's array."""
        return self.count * int(self.dtype.itemsize)
