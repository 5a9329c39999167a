"""Flight recorder: the last calls of one group, kept at all times to explain a hang.

A call records its text at the start of its turn, which costs some 20 ns. Everything else is derived on demand: the
group has the number of the last call, earlier calls count down from it, and the owner of the group's turn shows whether
a call is still running.
"""

from __future__ import annotations

from collections import deque

LAST = 64
"""Calls kept for each group."""

FlightRecorder = deque[str]
"""The texts of the last calls, oldest first. Appending is atomic: a call records itself before its turn ends."""


def new_flight_recorder() -> FlightRecorder:
    """Return an empty flight recorder."""
    return deque(maxlen=LAST)
