"""Random streams: the same draws where a tensor is whole, others where it is divided. [pure]

Every rank of a tensor-parallel axis has its framework's random state from the same seed, and draws what is whole, such
as dropout of a residual stream, from it: the same on all. What is divided is drawn from a generator of its own, whose
seed is one number of that same state folded with the rank. So there is no further state: whoever saves and restores
the framework's, as recomputation and checkpoints do, has all streams.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_MASK = (1 << 64) - 1


def fold(seed: int, place: int) -> int:
    """Return a seed of 63 bits made of another one and a place, different for each place (splitmix64)."""
    state = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def seed_at(seed: int, coordinates: Mapping[str, int], same: Collection[str] = ("tp",)) -> int:
    """Return the seed of a rank at these coordinates of a mesh: the same along the axes `same`, else different."""
    for axis, place in sorted(coordinates.items()):
        if axis not in same and place:
            seed = fold(seed ^ sum(ord(letter) << (8 * (at % 7)) for at, letter in enumerate(axis)), place)
    return seed
