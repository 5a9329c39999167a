"""ShardAxes: over which ranks a bucket is sharded, and over which its parts are replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.errors import UsageError
from commlib.sharding.shards import world_ranks


@dataclass(frozen=True, slots=True)
class ShardAxes:
    """The two axes of the ranks `whole`, over which a bucket is reduced. All are Communicators.

    Together, the ranks of `shard` have one copy of the parameters. The ranks of `replica` have the same part; None if
    there is one copy. Only operations of `whole` may use them if there are several.
    """

    whole: Any
    shard: Any
    replica: Any = None

    @classmethod
    def of(cls, ranks: ReducerRanks, axis: str, shard_axis: str) -> ShardAxes:
        """Split the ranks of an axis by a second one, such as the ranks of a node; "" shards over all. Collective.

        Raises UsageError on every rank if the second axis has different numbers of these ranks.
        """
        whole: Any = ranks.along(axis)
        if not shard_axis or whole.size == 1:
            return cls(whole, whole)
        everyone, together = world_ranks(whole), world_ranks(ranks.along(shard_axis))
        mine = [place for place, rank in enumerate(everyone) if rank in together]
        sizes = whole.all_gather_object(len(mine))
        if len(set(sizes)) > 1:
            raise UsageError(
                f"buckets cannot be sharded over axis {shard_axis!r}: it has {min(sizes)} of the ranks "
                f"{list(everyone)} in one place and {max(sizes)} in another"
            )
        shard, replica = whole.split_all([(mine[0], 0, "shard"), (mine.index(whole.rank), 0, "replica")])
        return cls(whole, shard, None if replica.size == 1 else replica)
