"""Random streams of Keras: ranks draw the same numbers for unsharded tensors, and different ones for shards.

The state of a `keras.random.SeedGenerator` is a variable, the same on all ranks of an axis. A draw for a shard takes
the next seed on every rank, and combines it with the rank. So there is no further state: saving and restoring Keras'
state covers all streams.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.mesh_groups import Mesh
from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.tensor_parallel.streams import fold, seed_at
from commlib_tensorflow.tensor.moves import axis_of

__all__ = ["dropout", "own", "seed"]

_NO_SEED = 87654321  # TensorFlow's value if no seed was set
_BITS = 31  # of a seed: Keras takes it modulo 2^31 - 2, which does not change smaller ones


def seed(mesh: Mesh, number: int, same: Collection[str] = ("tp",)) -> int:
    """Seed Python, numpy and Keras: the same on all ranks along the axes `same` of the mesh, otherwise different seeds.

    Returns this rank's seed, of 32 bits. Every rank passes the same number.

    Args:
        mesh: The mesh.
        number: The seed, the same on every rank.
        same: Names of axes along which ranks draw the same numbers.

    Examples:
        ct.tensor.seed(mesh, 1234)  # equal along tp, different along dp
    """
    derived = seed_at(number, mesh.shape.coordinates(mesh.comm.rank), same) % (1 << 32)
    keras.utils.set_random_seed(derived)
    return derived


def draw_alike(comm: Communicator) -> None:
    """Make all ranks draw the same numbers from now on: unless their seeds agree, they get rank 0's seed. Collective.

    Keras draws the order of rows in `fit`, which must be the same, or ranks would add up different rows.
    """
    seeds = set(comm.all_gather_object(tf.compat.v1.get_seed(1)[0]))
    if comm.size > 1 and (len(seeds) > 1 or _NO_SEED in seeds):
        keras.utils.set_random_seed(int(comm.broadcast(np.array([random.getrandbits(_BITS)]))[0]))


def dropout(x: Any, rate: float, seed_generator: Any, ranks: AxisRanks) -> Any:
    """Apply `keras.random.dropout(x, rate, seed=seed_generator)` to a shard: with a different mask on each rank.

    For layers in training: it draws in each call with a rate above 0.

    Args:
        x: This rank's shard.
        rate: The share of elements that is dropped.
        seed_generator: A SeedGenerator, or the result of its `next()`: draw that outside of a function that
            `tf.recompute_grad` calls twice, so that both calls drop the same.
        ranks: The ranks of the axis, such as `mesh["tp"]`.

    Examples:
        ct.tensor.dropout(x, 0.1, self.seed_generator, mesh["tp"])
    """
    if rate == 0:
        return x
    seed_value = seed_generator.next() if isinstance(seed_generator, keras.random.SeedGenerator) else seed_generator
    return tf.nn.experimental.stateless_dropout(x, rate, seed=tf.cast(own(seed_value, ranks), tf.int32))


class RankStream(keras.random.SeedGenerator):  # type: ignore[misc]  # Keras has no types
    """A seed generator whose seeds differ between ranks; its state is the same on all ranks."""

    def become(self, axis: ParallelAxis) -> None:
        """Make this the stream of a rank of `axis`."""
        self.axis = axis

    def next(self, ordered: bool = True) -> Any:
        """Return the next seed."""
        return own(super().next(ordered), self.axis)


def own(seed_value: Any, ranks: AxisRanks) -> Any:
    """Return this rank's seed, from the pair of numbers that all ranks have drawn. For one rank it is unchanged."""
    shared = axis_of(ranks, "own")
    if shared.size == 1:
        return seed_value
    place = tf.constant([fold(0, shared.rank) >> (63 - _BITS + 1), 0], seed_value.dtype)
    return tf.bitwise.bitwise_xor(seed_value, place)


def split_streams(layer: Any, axis: ParallelAxis) -> None:
    """Make the seed generators of a layer, and of those within it, draw different seeds on each rank."""
    for one in (layer, *layer._flatten_layers(include_self=False)):
        for value in vars(one).values():
            if type(value) is keras.random.SeedGenerator:
                value.__class__ = RankStream
                value.become(axis)
