"""Call: the arguments of a verb that must be the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from commlib.dtypes import name_of


@dataclass(frozen=True, slots=True)
class Call:
    """The signature of a verb's call. Calls with the same signature share one compiled call.

    size: the elements of each rank's array, or its shape where dimension 0 matters; None if no data moves. op: of a
    reduction. root: -1 if the verb has none. algorithm: "auto", the name of a path or of a schedule; "" if the verb
    offers no choice. rows: the rows of each rank, if they are uneven and all ranks know them. device: of the arrays,
    "" for the host. whole: the elements of the full call, if this call is one piece of it. label: see
    `Communicator.labelled`.
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
    label: str = ""

    @property
    def text(self) -> str:
        """The text that ranks compare, and that errors show."""
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
        details += [self.label] * bool(self.label)
        return ", ".join(details)

    @property
    def count(self) -> int:
        """The elements of each rank's array."""
        return self.size if isinstance(self.size, int) else math.prod((0,) if self.size is None else self.size)

    @property
    def nbytes(self) -> int:
        """The bytes of each rank's array."""
        return self.count * int(self.dtype.itemsize)
