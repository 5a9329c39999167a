"""Naps: how long a rank sleeps between polls, by the length of its wait.

A nap costs some 15 us of a core. It lasts a two-hundredth of the wait so far, from 50 us to 2 ms: a rank reacts at
most half a per cent too late, and a wait of seconds takes one per cent of a core instead of ten.
"""

from __future__ import annotations

SHORTEST_NAP, LONGEST_NAP = 50e-6, 2e-3  # seconds
_SHARE = 1 / 200
_MOST, _FEWEST = 20, 5  # naps of one call of a compiled loop: about 1 ms of short ones, at most 10 ms


def nap_seconds(elapsed: float) -> float:
    """Return the length of the next nap in seconds, after a wait of `elapsed` seconds."""
    return min(max(elapsed * _SHARE, SHORTEST_NAP), LONGEST_NAP)


def kernel_naps(elapsed: float) -> tuple[int, int]:
    """Return how many naps a compiled loop takes before it returns to Python, and their length in microseconds."""
    nap = nap_seconds(elapsed)
    return max(round(_MOST * SHORTEST_NAP / nap), _FEWEST), round(nap * 1e6)
