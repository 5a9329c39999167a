"""Tied weights: keep a weight that stages on several ranks share equal, and its gradient complete."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.errors import MismatchError
from commlib.pipeline.tied_weights import find_shared
from commlib_tensorflow._bridge import to_array, to_tensor


@dataclass(frozen=True, slots=True)
class _TiedWeight:
    """A variable of this rank, and the communicator of the ranks that share it.

    number: its index among shared variables.
    """

    number: int
    variable: Any
    comm: Communicator


class TiedWeights:
    """The variables of this rank that other ranks have, too."""

    def __init__(self, comm: Communicator, tied: Sequence[_TiedWeight], everything: Sequence[Any]) -> None:
        self._comm, self._everything = comm, everything
        self._tied = self._trained = tied

    @property
    def exist(self) -> bool:
        """Whether any rank shares variables."""
        return bool(self._everything)

    @classmethod
    def find(cls, comm: Communicator, parts: Sequence[Any], placement: Sequence[int]) -> TiedWeights:
        """Find the variables that several ranks share, in a model that is still whole on this rank. Collective."""
        shared = find_shared(comm, [part.variables for part in parts], placement)
        own = [_TiedWeight(number, one, group) for number, (one, group) in enumerate(shared) if group is not None]
        return cls(comm, own, [variable for variable, _ in shared])

    def spread(self) -> None:
        """Broadcast the values of each variable's first owner to all owners. Collective over the owners."""
        for tied in self._tied:
            array = np.array(to_array(tf.convert_to_tensor(tied.variable.value)))
            tied.comm.broadcast(array, 0)
            tied.variable.assign(array)

    def settle(self) -> None:
        """Agree on which of them are trainable from now on. Collective, if there are any.

        Raises MismatchError on all ranks for one that only some of its owners train.
        """
        if not self.exist:
            return
        answers = self._comm.all_gather_object({tied.number: bool(tied.variable.trainable) for tied in self._tied})
        for number, variable in enumerate(self._everything):
            trained = {one[number]: rank for rank, one in reversed(list(enumerate(answers))) if number in one}
            if len(trained) > 1:
                raise MismatchError(
                    f"pipeline: {variable.path} is a weight that stages on several ranks share: it is frozen on rank "
                    f"{trained[False]} and trainable on rank {trained[True]}. Set trainable to the same value on all "
                    "ranks, and compile again"
                )
        self._trained = [tied for tied in self._tied if tied.variable.trainable]

    def add_up(self, gradients: MutableMapping[int, tf.Tensor | None]) -> None:
        """Add the gradients of all owners, by the id of the variable. Collective over the owners."""
        for tied in self._trained:
            own = gradients.get(id(tied.variable))
            value = tf.convert_to_tensor(tied.variable.value)
            array = np.zeros(value.shape, value.dtype.as_numpy_dtype) if own is None else np.array(to_array(own))
            tied.comm.all_reduce(array, "sum", out=array)
            gradients[id(tied.variable)] = to_tensor(array)

    def has(self, variable: Any) -> bool:
        """Return whether other ranks have a variable, too."""
        return any(tied.variable is variable for tied in self._tied)

    def is_counted_elsewhere(self, variable: Any) -> bool:
        """Return whether another rank counts this variable in norms."""
        return any(tied.variable is variable and tied.comm.rank != 0 for tied in self._tied)
