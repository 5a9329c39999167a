"""Training state that is committed and restored in memory, as in `horovod.torch.elastic`.

    state = commlib_torch.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @commlib_torch.elastic.run
    def train(state): ...

The ranks of a job stay the same; what is restored from is a failed operation.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from commlib import horovod as core
from commlib.horovod.elastic import ObjectState, State, run
from commlib_torch.broadcast import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(Sampler[int]):
    """Shares the indices of `dataset` among the ranks, and after a restart those that were not processed yet.

    Call `record_batch` (or `record_indices`) after each batch, and `set_epoch` at the end of an epoch, which forgets
    what was processed. Put it into the `TorchState`. Every rank gets equally many: the first indices occur twice
    if need be. `seed` must be the same on all ranks.
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
        self.num_replicas, self.rank = core.size(), core.rank()
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

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._mine))

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """Models, optimizers, schedulers, samplers and picklable values: what a training loop goes on from.

    `model`, `optimizer` and every other argument become attributes. `commit()` keeps a copy in memory, `restore()` goes
    back to it, `sync()` gives all ranks what rank 0 has. `commit` and `sync` are collective: what the ranks have
    processed of a sampler's indices is put together.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._keepers: dict[str, _Keeper] = {}
        plain: dict[str, Any] = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            keeper = _keeper_of(value)
            if keeper is None:
                plain[name] = value
            else:
                self._keepers[name] = keeper
                object.__setattr__(self, name, value)
        super().__init__(**plain)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Another model or optimizer of a name is kept from then on, from the state it has now."""
        keepers = self.__dict__.get("_keepers", {})
        if name in keepers:
            keeper = _keeper_of(value)
            if keeper is None:
                raise TypeError(f"{name} is a {type(value).__name__}, whose state cannot be kept as it was so far")
            keepers[name] = keeper
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of everything. Collective if there are samplers."""
        for keeper in self._keepers.values():
            keeper.save()
        super().save()

    def restore(self) -> None:
        """Go back to the copy."""
        for keeper in self._keepers.values():
            keeper.restore()
        super().restore()

    def sync(self) -> None:
        """Take everything from rank 0, and keep a copy. Collective."""
        for keeper in self._keepers.values():
            keeper.sync()
        super().sync()

    def reset(self) -> None:
        """Share what is left of the samplers' indices anew."""
        for keeper in self._keepers.values():
            if isinstance(keeper, _SamplerKeeper):
                keeper.value.reset()


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class _Keeper:
    """Keeps the state of one object that has `state_dict`; a scheduler, say."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy again: torch goes on with the very tensors that it loads, and they must not change.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(core.broadcast_object(self.value.state_dict()))
        self.save()


class _ModelKeeper(_Keeper):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), 0)
        self.save()


class _OptimizerKeeper(_Keeper):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0)
        self.save()


class _SamplerKeeper(_Keeper):
    def save(self) -> None:
        self._put_together()
        super().save()

    def sync(self) -> None:
        self.value.epoch = core.broadcast_object(self.value.epoch)
        self._put_together()
        super().save()
        self.value.reset()

    def _put_together(self) -> None:
        """Count as processed what any rank has processed. The shares of this epoch stay what they are until `reset`."""
        self.value.processed_indices = set().union(*core.allgather_object(self.value.processed_indices))
        self.value.processed_num = len(self.value.processed_indices)


def _keeper_of(value: Any) -> _Keeper | None:
    if isinstance(value, torch.nn.Module):
        return _ModelKeeper(value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerKeeper(value)
    if isinstance(value, ElasticSampler):
        return _SamplerKeeper(value)
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
        return _Keeper(value)
    return None
