"""ResumePoint: resume compression after a restart, with the same buckets and from the first step.

The first step of a new run is not compressed, because it shows the order in which gradients become ready. A resumed run
knows that order. Another uncompressed step would change its results.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from commlib.comparison.parameter_check import GatherRanks

log = logging.getLogger("commlib")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State that determines how the next step is compressed, apart from each parameter's memory. Equal on all ranks."""

    scheme: str
    order: tuple[int, ...] | None
    """Parameter numbers in the order in which their gradients become ready; None is reverse module order."""
    sparse: tuple[int, ...]
    """Parameters whose gradients are sparse."""
    steps: int
    """Compressed reductions so far."""

    def save(self) -> dict[str, Any]:
        """Return plain values, which `torch.load` accepts with weights_only=True."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def load(cls, saved: dict[str, Any]) -> ResumePoint:
        """Restore what `save` returned."""
        order = saved["order"]
        return cls(saved["scheme"], None if order is None else tuple(order), tuple(saved["sparse"]), saved["steps"])


def agree_on_resume_point(comm: GatherRanks, mine: ResumePoint | None) -> ResumePoint | None:
    """Return the resume point that all ranks have loaded; None if some have not, or if they differ. Collective."""
    everyone: list[ResumePoint | None] = comm.all_gather_object(mine)
    first = everyone[0]
    if first is not None and all(theirs == first for theirs in everyone):
        return first
    if any(everyone) and comm.rank == 0:
        steps_by_rank = ", ".join(f"rank {r} {c.steps if c else 'none'}" for r, c in enumerate(everyone))
        log.warning(
            "compression starts over because ranks have loaded different states, with these compressed steps: %s; "
            "load the optimizer state of the same step on every rank to resume exactly",
            steps_by_rank,
        )
    return None
