"""Random streams of Keras: draw the same where a tensor is whole, and otherwise where it is divided.

The state of a `keras.random.SeedGenerator` is a variable, the same on all ranks of an axis. A draw for what is divided
takes the next number of it, on every rank, and changes it by what belongs to the rank. So there is no further state:
whoever saves and restores Keras' has all streams.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.mesh_groups import Mesh
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.streams import fold, seed_at
from commlib_tensorflow.tensor.moves import On, axis_of

_NO_SEED = 87654321  # what TensorFlow says if nobody has given one
_BITS = 31  # of a seed: Keras takes it modulo 2^31 - 2, which leaves these as good as they are


def seed(mesh: Mesh, number: int, same: Collection[str] = ("tp",)) -> int:
    """Seed Python, numpy and Keras: the same on all ranks along the axes `same` of the mesh, else different ones.

    Returns this rank's seed, of 32 bits. Every rank gives the same number.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(f"seed: expected a whole number from 0 on, got {number!r}")
    found = seed_at(number, mesh.shape.coordinates(mesh.comm.rank), same) % (1 << 32)
    keras.utils.set_random_seed(found)
    return found


def draw_alike(comm: Communicator) -> None:
    """Let all ranks draw the same from now on: they are seeded alike, by rank 0, unless they have been. Collective.

    Of what Keras draws of itself, the order of rows in `fit` has to be the same, or ranks would add up other rows.
    """
    seeds = set(comm.all_gather_object(tf.compat.v1.get_seed(1)[0]))
    if comm.size > 1 and (len(seeds) > 1 or _NO_SEED in seeds):
        keras.utils.set_random_seed(int(comm.broadcast(np.array([random.getrandbits(_BITS)]))[0]))


def dropout(x: Any, rate: float, seed_generator: Any, axis: On) -> Any:
    """Return `keras.random.dropout(x, rate, seed=seed_generator)` of what is divided: with another mask on each rank.

    For layers in training: it draws whenever it is called with a rate above 0. seed_generator: a SeedGenerator, or what
    its `next()` gave: draw that outside of a function that `tf.recompute_grad` calls twice, which drops the same then.
    """
    if rate == 0:
        return x
    drawn = seed_generator.next() if isinstance(seed_generator, keras.random.SeedGenerator) else seed_generator
    return tf.nn.experimental.stateless_dropout(x, rate, seed=tf.cast(own(drawn, axis), tf.int32))


class OwnStream(keras.random.SeedGenerator):  # type: ignore[misc]  # Keras has no types
    """A seed generator whose seeds are this rank's own; its state is that of all ranks."""

    def become(self, axis: Axis) -> None:
        """Be this rank's stream from now on."""
        self.axis = axis

    def next(self, ordered: bool = True) -> Any:
        """Return the next seed."""
        return own(super().next(ordered), self.axis)


def own(drawn: Any, axis: On) -> Any:
    """Return the seed of this rank, of the pair of numbers that all ranks have drawn. Nothing changes for one rank."""
    shared = axis_of(axis)
    if shared.size == 1:
        return drawn
    place = tf.constant([fold(0, shared.rank) >> (63 - _BITS + 1), 0], drawn.dtype)
    return tf.bitwise.bitwise_xor(drawn, place)


def divide_streams(layer: Any, axis: Axis) -> None:
    """Let the seed generators of a layer, and of those within it, be this rank's own streams."""
    for one in (layer, *layer._flatten_layers(include_self=False)):
        for value in vars(one).values():
            if type(value) is keras.random.SeedGenerator:
                value.__class__ = OwnStream
                value.become(axis)
