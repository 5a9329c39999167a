"""Every codec on a late device: the bytes, values and residuals of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.compress.codecs.cast import Cast, Float8
from commlib.compress.codecs.quantise import QSGD, Blocks
from commlib.compress.codecs.sign import Sign
from commlib.compress.codecs.sparse import VALUES, RandomK, TopK, most_bytes
from commlib.devices.arrays import as_contiguous
from commlib.errors import UsageError
from commlib.kernels.host import sparse
from commlib.kernels.host.table import VALUES as NUMBERS
from tests.late import LATE

CODECS: list[Any] = [
    Cast("float16"),
    Cast("bfloat16"),
    Float8("e4m3", 64),
    Float8("e5m2", 64),
    Blocks(8, 64),
    Blocks(4, 64),
    Blocks(8, 64, "stochastic"),
    QSGD(bucket=64),
    Sign(64),
    TopK(0.1),
    TopK(0.1, "bfloat16"),
    RandomK(0.1),
]
each = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def put(values):
    return as_contiguous(LATE.put(values), "test")


def back(array):
    return array.owner.numpy()


@each
@pytest.mark.parametrize("count", [0, 1, 999])
def test_bytes_and_values_match_the_host(codec, count):
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    payload = np.zeros(codec.payload_bytes(count), np.uint8)
    used = codec.encode(x, payload, seed=5)
    late = put(np.zeros_like(payload))
    assert codec.encode(put(x), late, seed=5) == used
    np.testing.assert_array_equal(back(late)[:used], payload[:used])
    for add in (False, True):
        out = np.full(count, 0.5, np.float32)
        there = put(out)
        codec.decode(payload, out, add=add)
        codec.decode(late, there, add=add)
        np.testing.assert_array_equal(back(there), out)


@each
@pytest.mark.parametrize("in_place", [False, True])
def test_residuals_match_the_host(codec, in_place):
    x, before = np.random.default_rng(1).standard_normal((2, 300)).astype(np.float32)
    there = put(x), put(before), put(np.zeros(codec.payload_bytes(300), np.uint8))
    late_after = there[1] if in_place else put(before)
    payload, after = np.zeros(codec.payload_bytes(300), np.uint8), before if in_place else before.copy()
    used = codec.encode(x, payload, seed=2, residual=(before, after))
    assert codec.encode(there[0], there[2], seed=2, residual=(there[1], late_after)) == used
    np.testing.assert_array_equal(back(there[2])[:used], payload[:used])
    np.testing.assert_array_equal(back(late_after), after)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.fixed], ids=lambda codec: codec.name)
def test_codecs_of_known_length_only_queue_work(codec, monkeypatch):
    monkeypatch.setattr(LATE, "delay", 0.05)
    x, payload = put(np.ones(256, np.float32)), put(np.zeros(codec.payload_bytes(256), np.uint8))
    LATE.synchronise()
    out = x.empty((256,), np.float32)
    codec.encode(x, payload)
    codec.decode(payload, out)
    assert np.isnan(out.owner.peek()).all()
    assert np.isfinite(back(out)).all()


@pytest.mark.parametrize("codec", [TopK(0.5), RandomK(0.5)], ids=lambda codec: codec.name)
def test_a_broken_payload_is_refused(codec):
    payload = put(np.full(40, 255, np.uint8))
    with pytest.raises(UsageError, match="decode: the payload"):
        codec.decode(payload, put(np.zeros(10, np.float32)))


def test_wrong_arrays_are_refused():
    x, payload = put(np.zeros(8, np.float32)), put(np.zeros(100, np.uint8))
    with pytest.raises(UsageError, match="one device"):
        Blocks().encode(x, np.zeros(100, np.uint8))
    with pytest.raises(UsageError, match="x must be a 1-D float32"):
        Blocks().encode(put(np.zeros(8)), payload)
    with pytest.raises(UsageError, match="takes 12 bytes"):
        Blocks().encode(x, payload[:11])
    with pytest.raises(UsageError, match="have the length of x"):
        Blocks().encode(x, payload, residual=(x, x[:3]))


@pytest.mark.parametrize("value", VALUES)
def test_the_longest_payload_matches_the_kernels(value):
    for count in (0, 1, 254, 255, 256, 70_000, 200_000):
        for k in (0, 1, count // 100, count):
            assert most_bytes(count, k, value) == sparse.max_bytes(count, k, NUMBERS[value])
