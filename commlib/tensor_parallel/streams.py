"""Random streams: equal draws for unsharded tensors, different ones for shards. [pure]

All ranks of a tensor-parallel axis seed their framework's random state equally, and draw unsharded values from it, such
as dropout of a residual stream: they are the same on all. Shards are drawn from a separate generator, whose seed is one
number of that state folded with the rank. So there is no further state: saving and restoring the framework's state, as
recomputation and checkpoints do, covers all streams.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from commlib.errors import UsageError

_MASK = (1 << 64) - 1


def fold(seed: int, place: int) -> int:
    """Return a seed of 63 bits made from another one and an index, different for each index (splitmix64)."""
    state = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def seed_at(seed: int, coordinates: Mapping[str, int], same: Collection[str] = ("tp",)) -> int:
    """Return the seed of a rank at these coordinates of a mesh: equal along the axes `same`, else different.

    Raises UsageError for a seed that is no whole number of at least 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed: expected a non-negative integer, got {seed!r}")
    for axis, place in sorted(coordinates.items()):
        if axis not in same and place:
            seed = fold(seed ^ sum(ord(letter) << (8 * (at % 7)) for at, letter in enumerate(axis)), place)
    return seed
