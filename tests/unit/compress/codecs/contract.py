"""Contract: check what every dense codec promises, for the tests of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from commlib.compress.codec import Codec
from commlib.dtypes import Array

GREATEST = float(np.finfo(np.float32).max)
LEAST_NORMAL = 2.0**-126
_MARGIN = 19  # bytes behind a payload that nobody may touch; odd, so that slices are unaligned


@st.composite
def arrays(draw: Any, block: int, exponents: tuple[int, int] = (-149, 126)) -> Any:
    """Float32 arrays around the lengths of blocks, of any magnitude, with zeros, and with blocks of zeros."""
    edges = st.sampled_from([0, 1, 2, 9, block - 1, block, block + 1, 2 * block, 3 * block + 5])
    count = draw(edges | st.integers(0, 3 * block))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 10, 60]))
    exponent = generator.uniform(-spread, 0, count) + draw(st.integers(*exponents))
    values = np.ldexp(generator.uniform(-2, 2, count), exponent.astype(int)).astype(np.float32)
    values[generator.random(count) < draw(st.sampled_from([0, 0.1, 0.9]))] = 0
    if draw(st.booleans()):
        values[:block] = 0
    return values


def encode(codec: Codec, x: Array, **options: Any) -> Array:
    """Return the payload, as long as it must be, from an unaligned place in memory."""
    length = codec.payload_bytes(len(x))
    memory = np.full(length + 2 * _MARGIN, 0xAA, np.uint8)
    assert codec.encode(x, memory[_MARGIN:-_MARGIN], **options) == length
    assert (memory[:_MARGIN] == 0xAA).all() and (memory[-_MARGIN:] == 0xAA).all()
    return memory[_MARGIN:-_MARGIN]


def decode(codec: Codec, payload: Array, count: int) -> Array:
    """Decode a payload, and check that decoding with `add` adds the same values."""
    out = np.full(count, np.nan, np.float32)
    codec.decode(payload, out)
    total = np.linspace(-3, 5, count, dtype=np.float32)
    expected = total + out
    codec.decode(np.concatenate([payload, payload[:5]]), total, add=True)
    np.testing.assert_array_equal(total, expected)
    return out


def round_trip(codec: Codec, x: Array, **options: Any) -> Array:
    return decode(codec, encode(codec, x, **options), len(x))


def check_residual(codec: Codec, x: Array, before: Array, seed: int) -> None:
    """Check encoding with feedback against encoding the sum: no part of it may be lost or invented."""
    with np.errstate(over="ignore"):
        wanted = x + before
    original, after = x.copy(), np.full_like(x, np.nan)
    payload = encode(codec, x, seed=seed, residual=(before, after))
    np.testing.assert_array_equal(payload, encode(codec, wanted, seed=seed))
    np.testing.assert_array_equal(x, original)
    decoded = decode(codec, payload, len(x))
    finite = np.isfinite(decoded)
    # after = fl(wanted - decoded): one rounding of a float32. In float64 the sum of two float32 is exact or nearly so.
    error = np.abs(decoded.astype(np.float64) + after - wanted)[finite]
    assert (error <= 2.0**-24 * np.abs(after[finite].astype(np.float64)) * (1 + 2.0**-20)).all()
    np.testing.assert_array_equal(after[~finite], before[~finite])
    in_place = before.copy()
    np.testing.assert_array_equal(encode(codec, x, seed=seed, residual=(in_place, in_place)), payload)
    np.testing.assert_array_equal(in_place, after)


def check_not_finite(codec: Codec, block: int, culprit: float) -> None:
    """Check that one culprit turns its block into NaN, and changes neither the residual there nor any other block."""
    x = np.random.default_rng(3).standard_normal(3 * block + 5).astype(np.float32)
    clean = round_trip(codec, x)
    for at in (0, block + 3, len(x) - 1):
        spoiled = x.copy()
        spoiled[at] = culprit
        decoded = round_trip(codec, spoiled)
        mine = np.arange(len(x)) // block == at // block
        assert np.isnan(decoded[mine]).all()
        np.testing.assert_array_equal(decoded[~mine], clean[~mine])
        before, after = np.full_like(x, 0.25), np.zeros_like(x)
        encode(codec, spoiled, residual=(before, after))
        assert (after[mine] == 0.25).all()
        encode(codec, spoiled, residual=(before, before))
        np.testing.assert_array_equal(before, after)
    huge = np.full(5, GREATEST, np.float32)
    before = huge.copy()
    assert np.isnan(decode(codec, encode(codec, huge, residual=(before, before)), 5)).all()  # the sum overflows
    assert (before == GREATEST).all()


def check_unbiased(codec: Codec, x: Array, unit: float, rounds: int = 2000) -> None:
    """Check that 8 decoded blocks like x are right in the mean: by element, by array, and without common noise.

    A decoded value is one of two neighbours a unit apart. By Hoeffding's inequality the mean of n of them is off by
    more than 3.5 / sqrt(n) units with a chance below 2 exp(-2 * 3.5²) = 5e-11. What float32 adds is below 127 * 2^-22:
    quotient, two roundings and a clamp at the greatest code.
    """
    tiled = np.tile(x, 8)
    noise = np.array([round_trip(codec, tiled, seed=seed) for seed in range(rounds)], np.float64) - tiled
    noise /= unit
    bias = 127 * 2.0**-22
    assert (np.abs(noise) <= 1 + bias).all()
    assert (np.abs(noise.mean(0)) <= 3.5 / rounds**0.5 + bias).all()
    assert (np.abs(noise.mean(1)) <= 3.5 / len(tiled) ** 0.5 + bias).all()
    # Products of independent errors have the expectation 0 and, as an error's variance is at most 1/4, one of at most
    # 1/16; so has an error times the distance to the nearest code, which is at most 1/2: 7 standard errors of the mean.
    rest = tiled / unit - np.rint(tiled / unit)
    block = len(x)
    neighbours = noise[:, 1:] * noise[:, :-1], noise[1:] * noise[:-1], noise[:, block:] * noise[:, :-block]
    for product in (noise * rest, *neighbours):
        assert abs(product.mean()) <= 7 * 0.25 / product.size**0.5 + bias
    assert noise.std() > 0.1  # there is noise
