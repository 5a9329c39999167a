"""Activations sent with a codec."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from commlib.compress import activations
from commlib.compress.codecs.cast import Cast
from commlib.compress.codecs.quantise import Blocks
from commlib.compress.codecs.sparse import TopK
from commlib.dtypes import NUMPY
from commlib.errors import UsageError
from tests.bodies.loopback import run
from tests.late import LATE, LateArray
from tests.unit.compress.known_codecs import Exact


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_an_activation_arrives(dtype):
    def pipe(comm):
        x = np.arange(12).reshape(3, 4).astype(dtype)
        if comm.rank == 0:
            activations.send(comm, Exact(), x, 1, tag=3)
        else:
            out = np.zeros((3, 4), dtype)
            assert activations.recv(comm, Exact(), out, 0, tag=3) is out
            np.testing.assert_array_equal(out, x)

    run(2, pipe)


@pytest.mark.parametrize("row", [(), (3,), (2, 2), (0,)])
def test_tokens_are_exchanged(row):
    def exchange(comm):
        splits = [(comm.rank + peer) % 3 for peer in range(comm.size)]
        x = np.full((sum(splits), *row), comm.rank, np.float32)
        rows, counts = activations.all_to_all_v(comm, Exact(), x, splits)
        assert counts.tolist() == [(comm.rank + peer) % 3 for peer in range(comm.size)]
        expected = np.repeat(np.arange(comm.size, dtype=np.float32), counts)
        assert rows.shape == (len(expected), *row)
        assert np.all(expected == rows.T)

    run(3, exchange)


def test_integers_and_wrong_splits_are_refused():
    def refuse(comm):
        with pytest.raises(UsageError, match="codecs take float16"):
            activations.send(comm, Exact(), np.arange(3), 0)
        with pytest.raises(UsageError, match="must be 1 non-negative lengths"):
            activations.all_to_all_v(comm, Exact(), np.zeros(3, np.float32), [2])
        with pytest.raises(UsageError, match="no fixed length"):
            activations.send(comm, Exact(fixed=False), np.zeros(3, np.float32), 0)

    run(1, refuse)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", [Cast("bfloat16"), Blocks(8, 64), TopK(0.5)], ids=lambda codec: codec.name)
def test_device_arrays_arrive_as_on_the_host(dtype, codec):
    def both(comm):
        splits = [(comm.rank + peer) % 3 for peer in range(comm.size)]
        x = np.random.default_rng(comm.rank).standard_normal((sum(splits), 9)).astype(NUMPY[dtype])
        rows, counts = activations.all_to_all_v(comm, codec, x, splits, seed=3)
        there, same_counts = activations.all_to_all_v(comm, codec, LATE.put(x), splits, seed=3)
        assert isinstance(there, LateArray) and there.shape == rows.shape and there.dtype == rows.dtype
        np.testing.assert_array_equal(there.numpy(), rows)
        np.testing.assert_array_equal(same_counts, counts)
        if not codec.fixed:
            return
        edge = np.random.default_rng(7).standard_normal((11, 9)).astype(NUMPY[dtype])
        if comm.rank == 0:
            activations.send(comm, codec, LATE.put(edge), 1)
            activations.send(comm, codec, edge, 1)
        elif comm.rank == 1:
            late, out = LATE.put(np.zeros_like(edge)), np.zeros_like(edge)
            assert activations.recv(comm, codec, late, 0) is late
            activations.recv(comm, codec, out, 0)
            np.testing.assert_array_equal(late.numpy(), out)

    races = LATE.races
    run(3, both)
    assert LATE.races == races
