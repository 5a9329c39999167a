"""Values of variables: every rank of an axis takes those of its rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from commlib.communicator import Communicator
from commlib.errors import UsageError


def take_values_of_rank_0(what: str, variables: Iterable[Any], comm: Communicator) -> None:
    """Give variables of Keras the values that they have on rank 0. Collective."""
    with tf.init_scope():  # Keras may build a layer while a function is traced
        for variable in variables:
            if getattr(variable, "_value", variable) is None:
                raise UsageError(
                    f"{what}: Keras makes the values of {variable.path} later: call the model once on some data before "
                    "it is trained"
                )
            variable.assign(comm.broadcast(variable.numpy()))
