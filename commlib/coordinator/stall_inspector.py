"""StallInspector: find named operations that have waited long, and those that have timed out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from commlib.coordinator.pending_op import PendingOp


@dataclass(frozen=True, slots=True)
class StallInspector:
    """Detects operations that have waited long (after `warning` s) or timed out (after `timeout` s; 0: never)."""

    warning: float
    timeout: float

    def overdue(self, waiting: Mapping[str, PendingOp]) -> dict[str, bool]:
        """Return the names of operations that have waited long and were not reported yet; True: timed out.

        `waiting` is in the order of submission.
        """
        now = time.monotonic()
        found = {}
        for name, pending in waiting.items():
            waited = now - pending.since
            if 0 < self.timeout < waited:
                found[name] = True
            elif waited > self.warning and not pending.warned:
                found[name] = False
            elif waited < min(self.warning, self.timeout or self.warning):
                break  # later ones are younger
        return found
