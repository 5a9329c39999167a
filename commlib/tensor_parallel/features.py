"""Features: layers that have something of their own for each feature, as batch norms have weights and moments. [pure]

Between a Column and its Row that is divided with the features: `Sequence` names their dimension.
"""

from __future__ import annotations

from commlib.errors import UsageError
from commlib.sharding.sharding import Sharding


def check_dim(what: str, asked: int, dim: int, *, mixes: bool = True) -> None:
    """Raise UsageError unless a style asks for the dimension that a layer has weights of; both counted from the front.

    mixes: the layer looks at all of the others together.
    """
    if asked != dim:
        also = ", and looks at all of the others together" if mixes else ""
        raise UsageError(
            f"plan: {what} has weights of dimension {dim}{also}: Sequence({dim}) divides it with its features, else "
            "leave it whole"
        )


def check_length(what: str, length: int | None, dim: int, expected: int) -> None:
    """Raise UsageError unless a rank has as many features as weights. what: the layer, and which rank calls it."""
    if length not in (expected, None):
        raise UsageError(
            f"{what}: its input has length {length} along dimension {dim}, expected {expected}: divide features evenly "
            "before it (Column without units=), or gather them"
        )


def own_groups(features: Sharding, rank: int, size: int) -> int:
    """Return how many groups of features, its units, one of `size` ranks has."""
    assert isinstance(features.units, int)
    return features.length(rank, size) * features.units // features.shape[0]
