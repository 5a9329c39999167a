"""ElasticSampler: share the indices of a dataset among the ranks, anew after each restart."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from commlib.horovod.operations import allgather_object, broadcast_object
from commlib.horovod.process_sets import running


class ElasticSampler:
    """Shares the indices of `dataset` among the ranks, and after a restart those that were not processed yet.

    Call `record_batch` (or `record_indices`) after each batch, and `set_epoch` at the end of an epoch, which forgets
    what was processed. Put it into the state that is committed. Every rank gets equally many: the first indices occur
    twice if need be. `seed` must be the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.processed_num = 0
        """Samples processed in this epoch by all ranks: until they are put together, as many as by this one each."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is processed, and there is another order."""
        self.epoch = epoch
        self.processed_indices, self.processed_num = set(), 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has processed the next `batch_size` of its indices.

        `batch_idx` does not matter: after a restart some count on from where they were, and others from 0.
        """
        batch = self._mine[self._recorded : self._recorded + batch_size]
        self._recorded += batch_size
        self.record_indices(batch)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has processed these indices of the dataset."""
        numbers = [int(index) for index in indices]
        self.processed_indices.update(numbers)
        self.processed_num += len(numbers) * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to know."""
        return {
            "epoch": self.epoch,
            "processed_indices": set(self.processed_indices),
            "processed_num": self.processed_num,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` returned, and share what is left anew."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.processed_num = state_dict.get("processed_num", len(self.processed_indices))
        self.reset()

    def reset(self) -> None:
        """Share what is not processed yet among the ranks that there are."""
        self.num_replicas, self.rank = running().size, running().rank
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
        """Count as processed what any rank has processed. Collective. The shares stay what they are until `reset`."""
        self.processed_indices = set().union(*allgather_object(self.processed_indices))
        self.processed_num = len(self.processed_indices)

    def sync(self) -> None:
        """Take the epoch of rank 0, and put together what was processed. Collective."""
        self.epoch = broadcast_object(self.epoch)
        self.put_together()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._mine))

    def __len__(self) -> int:
        return self.num_samples
