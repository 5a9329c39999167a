"""Operation: one checked call, ready to run once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)  # not frozen: that would triple the cost of creating one, in each call
class Operation:
    """A call. text: describes it, the same on all ranks that make the same call. run: executes it.

    It holds the arrays that it reads and writes, which keeps them alive while it is queued.

    must_match: the ranks always compare it, because `run` blocks in MPI: it runs after all ranks have arrived, on all
    of them. finish: converts `run`'s value to the result. Its exceptions affect this rank only: the call is done.
    """

    text: str
    run: Callable[[], Any]
    must_match: bool = False
    finish: Callable[[Any], Any] | None = None
