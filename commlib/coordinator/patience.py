"""Patience: find the named operations that have waited long, and those that have waited too long."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from commlib.coordinator.pending import Pending


@dataclass(frozen=True, slots=True)
class Patience:
    """Tell when an operation has waited long (after `warning` s) and too long (after `timeout` s; 0: never)."""

    warning: float
    timeout: float

    def overdue(self, waiting: Mapping[str, Pending]) -> dict[str, bool]:
        """Return the names of operations that have waited long and were not told of; True: too long.

        `waiting` is in the order in which they were asked for.
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
                break  # those behind it are younger
        return found
