"""ElasticSampler: shard the indices of a dataset over the ranks, again after each restart."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from commlib.horovod.operations import allgather_object, broadcast_object
from commlib.horovod.process_sets import require_world


class ElasticSampler:
    """Shards the indices of `dataset` over the ranks, and after a restart the unprocessed ones.

    Call `record_batch` (or `record_indices`) after each batch, and `set_epoch` at the end of an epoch, which clears
    the processed indices. Put it into the committed state. Every rank gets the same number of indices: the first ones
    occur twice if necessary. `seed` must be the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.processed_num = 0
        """Samples processed in this epoch by all ranks; until ranks combine their counts, `size` times this rank's."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no index is processed, and the order changes."""
        self.epoch = epoch
        self.processed_indices, self.processed_num = set(), 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed the next `batch_size` of its indices.

        `batch_idx` is ignored: after a restart some programs continue the count, others start from 0.
        """
        batch = self._mine[self._recorded : self._recorded + batch_size]
        self._recorded += batch_size
        self.record_indices(batch)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed these indices of the dataset."""
        numbers = [int(index) for index in indices]
        self.processed_indices.update(numbers)
        self.processed_num += len(numbers) * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a restart."""
        return {
            "epoch": self.epoch,
            "processed_indices": set(self.processed_indices),
            "processed_num": self.processed_num,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of `state_dict`, and shard the remaining indices again."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.processed_num = state_dict.get("processed_num", len(self.processed_indices))
        self.reset()

    def reset(self) -> None:
        """Shard the unprocessed indices over the current ranks."""
        self.num_replicas, self.rank = require_world().size, require_world().rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        self.remaining_indices = [index for index in order if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = list(self.remaining_indices)
        while 0 < len(padded) < self.total_size:
            padded += self.remaining_indices[: self.total_size - len(padded)]
        self._mine = padded[self.rank :: self.num_replicas]
        self._recorded = 0

    def put_together(self) -> None:
        """Combine the processed indices of all ranks. Collective. Shards do not change until `reset`."""
        self.processed_indices = set().union(*allgather_object(self.processed_indices))
        self.processed_num = len(self.processed_indices)

    def sync(self) -> None:
        """Take the epoch of rank 0, and combine the processed indices. Collective."""
        self.epoch = broadcast_object(self.epoch)
        self.put_together()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._mine))

    def __len__(self) -> int:
        return self.num_samples
