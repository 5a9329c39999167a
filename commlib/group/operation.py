"""Operation: hold one call that is checked and ready to run once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)  # not frozen: that would triple the price of making one, for each call
class Operation:
    """Hold a call: `text` says what is called, the same on all ranks that call the same thing. `run` does it.

    It holds the arrays that it reads and writes, so that they stay alive while it is queued.

    meets: ranks compare it always, because `run` blocks in MPI: none goes there before all have come, and all that
    have come do.
    finish: makes of `run`'s value what is returned. What it raises concerns this rank alone: its part is done.
    """

    text: str
    run: Callable[[], Any]
    meets: bool = False
    finish: Callable[[Any], Any] | None = None
