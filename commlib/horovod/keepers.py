"""Keepers: save and restore one object of a state that is not a plain value, such as a model."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from commlib.horovod.operations import broadcast_object
from commlib.horovod.sampler import ElasticSampler


class Keeper(Protocol):
    """Keeps a copy of the state of one object."""

    def save(self) -> None:
        """Save a copy of the current state."""
        ...

    def restore(self) -> None:
        """Restore the copy."""
        ...

    def sync(self) -> None:
        """Take the state from rank 0, and save a copy. Collective."""
        ...

    def reset(self) -> None:
        """Prepare for a restart of training."""
        ...


class StateKeeper:
    """Keeps an object with `state_dict` and `load_state_dict`, such as a scheduler."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Save a copy of the object's state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of the copy: a framework may keep using the tensors that it loads."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take the state of rank 0, and save a copy. Collective."""
        self.give()
        self.save()

    def give(self) -> None:
        """Give all ranks the state of rank 0. Collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        """Do nothing."""


class SamplerKeeper(StateKeeper):
    """Keeps an ElasticSampler. `save` is collective: it combines the processed indices of the ranks."""

    value: ElasticSampler

    def save(self) -> None:
        """Combine the processed indices, and save a copy."""
        self.value.put_together()
        super().save()

    def sync(self) -> None:
        """Take the epoch of rank 0, combine the processed indices, and shard the rest again."""
        self.value.sync()
        super().save()
        self.value.reset()

    def reset(self) -> None:
        """Shard the remaining indices again."""
        self.value.reset()
