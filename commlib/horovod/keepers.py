"""Keepers: save and restore one object of a state that is no plain value, such as a model."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from commlib.horovod.operations import broadcast_object
from commlib.horovod.sampler import ElasticSampler


class Keeper(Protocol):
    """Keeps a copy of the state of one object."""

    def save(self) -> None:
        """Keep a copy of what it is now."""
        ...

    def restore(self) -> None:
        """Go back to the copy."""
        ...

    def sync(self) -> None:
        """Take it from rank 0, and keep a copy. Collective."""
        ...

    def reset(self) -> None:
        """Do what is needed before training starts again."""
        ...


class StateKeeper:
    """Keeps an object that has `state_dict` and `load_state_dict`; a scheduler, say."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Keep a copy of its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of the copy: a framework may go on with the very tensors that it loads."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take the state of rank 0, and keep a copy. Collective."""
        self.give()
        self.save()

    def give(self) -> None:
        """Give all ranks the state of rank 0. Collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        """Do nothing."""


class SamplerKeeper(StateKeeper):
    """Keeps an ElasticSampler. `save` is collective: it puts together what the ranks have processed."""

    value: ElasticSampler

    def save(self) -> None:
        """Put together what was processed, and keep a copy."""
        self.value.put_together()
        super().save()

    def sync(self) -> None:
        """Take the epoch of rank 0, put together what was processed, and share the rest anew."""
        self.value.sync()
        super().save()
        self.value.reset()

    def reset(self) -> None:
        """Share what is left anew."""
        self.value.reset()
