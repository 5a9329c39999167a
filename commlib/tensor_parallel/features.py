"""Features: layers with weights or moments for each feature, such as batch norms. [pure]

Between a Column and its Row, these are sharded with the features: `Sequence` names the feature dimension.
"""

from __future__ import annotations

from collections.abc import Collection

from commlib.errors import UsageError
from commlib.sharding.sharding import Sharding


def check_dim(what: str, requested: int, dim: int, *, mixes: bool = True) -> None:
    """Raise UsageError unless a style names the dimension of a layer's weights; both are counted from the front.

    mixes: whether the layer mixes all other dimensions.
    """
    if requested != dim:
        also = ", and mixes all of the others" if mixes else ""
        raise UsageError(
            f"plan: {what} has weights of dimension {dim}{also}: Sequence({dim}) shards it with its features, else "
            "leave it whole"
        )


def check_norm(what: str, dim: int, reduced: Collection[int]) -> None:
    """Raise UsageError if a norm reduces over the sharded dimension. All are counted from the same end."""
    if dim in reduced:
        raise UsageError(
            f"plan: {what}: Sequence(dim={dim}), but this norm reduces over dimensions {list(reduced)}; of these it "
            "would see only a shard: gather the features first"
        )


def check_length(what: str, length: int | None, dim: int, expected: int) -> None:
    """Raise UsageError unless a rank has as many features as weights. what: the layer, and the calling rank."""
    if length not in (expected, None):
        raise UsageError(
            f"{what}: its input has length {length} along dimension {dim}, expected {expected}: split features evenly "
            "before it (Column without units=), or gather them"
        )


def own_groups(features: Sharding, rank: int, size: int) -> int:
    """Return the number of groups of features, its units, on one of `size` ranks."""
    assert isinstance(features.units, int)
    return features.length(rank, size) * features.units // features.shape[0]
