"""Course: go on with compression after a restart, with the same buckets and from the first step.

The first step of a new run is not compressed: it shows in which order gradients become ready. A resumed run knows that.
Another such step would make it a different run.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from commlib.comparison.parameter_check import Gathers

log = logging.getLogger("commlib")


@dataclass(frozen=True, slots=True)
class Course:
    """Hold what decides how the next step is compressed, beside the memory of each parameter. Equal on all ranks."""

    scheme: str
    order: tuple[int, ...] | None
    """Parameters by number, as their gradients become ready; None is reverse module order."""
    sparse: tuple[int, ...]
    """Parameters whose gradients are sparse."""
    steps: int
    """Compressed reductions so far."""

    def save(self) -> dict[str, Any]:
        """Return it as plain values, which `torch.load` takes without trusting the file."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Course:
        """Undo `save`."""
        order = saved["order"]
        return cls(saved["scheme"], None if order is None else tuple(order), tuple(saved["sparse"]), saved["steps"])


def agree(comm: Gathers, mine: Course | None) -> Course | None:
    """Return the course that all ranks have loaded, or None if they have not, or not the same. Collective."""
    everyone: list[Course | None] = comm.all_gather_object(mine)
    first = everyone[0]
    if first is not None and all(theirs == first for theirs in everyone):
        return first
    if any(everyone) and comm.rank == 0:
        said = ", ".join(f"rank {r} {c.steps if c else 'none'}" for r, c in enumerate(everyone))
        log.warning(
            "compression starts anew: ranks have loaded different states, of so many compressed steps: %s; load the "
            "optimizer's state of one step on every rank to go on exactly",
            said,
        )
    return None
