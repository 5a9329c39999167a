"""Flight: the last calls of one group, kept at all times, for whoever has to explain a hang.

A call notes its text as its turn comes, which costs some 20 ns. All else is known elsewhere once somebody asks: the
number of the last call is its group's, those before it count down from there, and whether it runs or has ended shows
in who holds the group's turn.
"""

from __future__ import annotations

from collections import deque

LAST = 64
"""Calls that are kept for each group."""

Flight = deque[str]
"""The texts of the last calls, oldest first. Appending is atomic: a call is noted before its turn is over."""


def new_flight() -> Flight:
    """Return that of a group that has called nothing."""
    return deque(maxlen=LAST)
