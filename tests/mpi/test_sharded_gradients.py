"""Sharded gradients over a mesh of replicas: training gives the parameters of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commlib
from commlib.data_parallel.array_values import ArrayValues
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.reducer_ranks import OrderedRanks

BATCH, INPUTS, HIDDEN = 24, 7, 300
LIMIT = 2**-10  # MiB: several buckets
STEPS, LEARNING_RATE, MOMENTUM = 4, 2**-6, 0.5


def gradients_of(parameters: list[Any], x: Any, y: Any) -> list[Any]:
    """Return the gradients of mean((x @ a @ b + c - y)^2) for parameters a, b, c."""
    a, b, c = parameters
    error = 2 * (x @ a @ b + c - y) / len(x)
    return [x.T @ error @ b.T, (x @ a).T @ error, error.sum(0)]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_with_replicated_shards_matches_one_process(comm: Any, shards: int, overlap: bool) -> None:
    mesh = commlib.Mesh(ranks=comm, replica=-1, shard=shards if comm.size % shards == 0 else 1)
    draws = np.random.default_rng(1)
    x, y = draws.standard_normal((BATCH, INPUTS)), draws.standard_normal((BATCH, 2))
    shapes = [(INPUTS, HIDDEN), (HIDDEN, 2), (2,)]
    alone = [draws.standard_normal(shape) / 4 for shape in shapes]
    momenta = [np.zeros(shape) for shape in shapes]

    described = [Gradient(name, shape, "float64") for name, shape in zip("abc", shapes, strict=True)]
    values = ArrayValues(described)
    options = Options(shard=True, shard_axis="shard", overlap=overlap, bucket_cap_mib=LIMIT, first_bucket_mib=LIMIT)
    reducer = GradientReducer(OrderedRanks(comm, {"shard": mesh["shard"]}), described, values, options)
    own = reducer.shards
    for bucket in range(len(reducer.buckets)):
        for piece in own.pieces(bucket):
            count = piece.stop - piece.start
            own.own(bucket)[piece.start : piece.stop] = alone[piece.parameter].reshape(-1)[piece.first :][:count]
    own_momenta = [np.zeros_like(own.own(bucket)) for bucket in range(len(reducer.buckets))]
    mine = [parameter.copy() for parameter in alone]
    rows = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    for _ in range(STEPS):
        reducer.begin()
        for index, gradient in reversed(list(enumerate(gradients_of(mine, x[rows], y[rows])))):
            values.give(index, gradient)
            reducer.ready(index)
        reducer.end()
        for bucket, momentum in enumerate(own_momenta):
            momentum *= MOMENTUM
            momentum += own.gradients(bucket)
            own.own(bucket)[...] -= LEARNING_RATE * momentum
        reducer.gather()
        reducer.stepped()
        mine = [reducer.gathered(index).reshape(shape).copy() for index, shape in enumerate(shapes)]
        for parameter, momentum, gradient in zip(alone, momenta, gradients_of(alone, x, y), strict=True):
            momentum *= MOMENTUM
            momentum += gradient
            parameter -= LEARNING_RATE * momentum
    for parameter, expected in zip(mine, alone, strict=True):
        np.testing.assert_allclose(parameter, expected, rtol=1e-12, atol=1e-14)
        assert len({array.tobytes() for array in comm.all_gather_object(parameter)}) == 1  # the same on all ranks
    mesh.close()
