"""Quantisation to integers against its definition in numpy, its error bounds, and its expectation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.codec import Codec
from commlib.compress.codecs.quantise import QSGD, Blocks
from commlib.errors import UsageError
from tests.unit.compress.codecs import contract

TOPS = {8: 127, 4: 7}
STOCHASTIC = [Blocks(8, 64, "stochastic"), Blocks(4, 64, "stochastic"), QSGD(127, 64), QSGD(3, 64)]


def split(payload, count, block):
    """Return (units, bytes of the codes) of a payload."""
    blocks = -(-count // block)
    return np.frombuffer(payload[: 4 * blocks].tobytes(), np.float32), payload[4 * blocks :]


def per_element(units, count, block):
    return np.repeat(units, block)[:count].astype(np.float64)


def definition(x, top, block):
    """Rounding to nearest in numpy: (units, codes), each operation in float32."""
    units, codes = [], [np.empty(0, np.int8)]
    top = np.float32(top)
    limit = np.nextafter(np.float32(contract.GREATEST) / top, np.float32(0))
    for start in range(0, len(x), block):
        part = x[start : start + block]
        unit = min(np.abs(part).max() / top, limit)
        unit = unit if unit >= contract.LEAST_NORMAL else np.float32(0)
        units.append(unit)
        codes.append(np.rint(part * (np.float32(1) / unit if unit else np.float32(0))).astype(np.int8))
    return np.array(units, np.float32), np.concatenate(codes)


def nibbles(codes, block):
    """Codes of 4 bits as they are packed: in each block the first half in the lower halves of its bytes."""
    packed = []
    for start in range(0, len(codes), block):
        part = codes[start : start + block]
        low, high = part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]
        row = (low & 15).astype(np.uint8)
        row[: len(high)] |= ((high & 15) << 4).astype(np.uint8)
        packed.append(row.tobytes())
    return b"".join(packed)


@settings(deadline=None, max_examples=80)
@given(data=st.data(), bits=st.sampled_from([8, 4]), block=st.sampled_from([8, 24, 256]))
def test_rounding_to_nearest_matches_its_definition(data, bits, block):
    x = data.draw(contract.arrays(block))
    codec = Blocks(bits, block)
    payload = contract.encode(codec, x)
    units, codes = definition(x, TOPS[bits], block)
    assert payload.tobytes() == units.tobytes() + (codes.tobytes() if bits == 8 else nibbles(codes, block))
    decoded = contract.decode(codec, payload, len(x))
    np.testing.assert_array_equal(decoded, codes * np.repeat(units, block)[: len(x)])
    assert not ((decoded != 0) & (np.abs(decoded) < contract.LEAST_NORMAL)).any()
    # Half a unit; and unit, inverse and two products are rounded, each by 2^-24 of at most 127 units.
    unit = per_element(units, len(x), block)
    error = np.abs(decoded.astype(np.float64) - x)
    assert (error <= np.where(unit > 0, unit * (0.5 + 127 * 2.0**-22), TOPS[bits] * contract.LEAST_NORMAL)).all()


@settings(deadline=None, max_examples=80)
@given(data=st.data(), codec=st.sampled_from(STOCHASTIC), seed=st.integers(-(2**63), 2**63 - 1))
def test_rounding_at_random_goes_to_a_neighbour(data, codec, seed):
    x = data.draw(contract.arrays(64))
    payload = contract.encode(codec, x, seed=seed)
    np.testing.assert_array_equal(payload, contract.encode(codec, x, seed=seed))
    units, _ = split(payload, len(x), 64)
    unit = per_element(units, len(x), 64)
    error = np.abs(contract.decode(codec, payload, len(x)).astype(np.float64) - x)
    # Less than a unit, with the roundings named above; where the unit is 0 the norm is below 127 of the least normal
    # numbers.
    assert (error <= np.where(unit > 0, unit * (1 + 127 * 2.0**-22), 128 * contract.LEAST_NORMAL)).all()
    # A longer array begins with the same codes.
    whole = len(x) // 64 * 64
    shorter = contract.encode(codec, x[:whole], seed=seed)
    known = codec.payload_bytes(whole) - 4 * (whole // 64)
    np.testing.assert_array_equal(split(shorter, whole, 64)[1], split(payload, len(x), 64)[1][:known])


@pytest.mark.parametrize("codec", STOCHASTIC, ids=lambda codec: codec.name)
def test_rounding_at_random_is_right_in_the_mean(codec):
    x = np.random.default_rng(5).standard_normal(64).astype(np.float32)
    x[:4] = [0, 3, -3, 1e-3]
    units, _ = split(contract.encode(codec, x), 64, 64)
    contract.check_unbiased(codec, x, float(units[0]))


@pytest.mark.parametrize("codec", STOCHASTIC, ids=lambda codec: codec.name)
def test_zeros_are_never_rounded_away(codec):
    x = np.zeros(64, np.float32)
    x[7] = 1
    for seed in range(20):
        decoded = contract.round_trip(codec, x, seed=seed)
        assert np.count_nonzero(decoded) == 1 and decoded[7] == 1


def test_random_rounding_never_exceeds_the_greatest_code():
    """Where rounding makes the greatest value a little more than 127 units, one in 2^17 would become -128 units."""
    values = np.linspace(1, 2, 1000, dtype=np.float32)
    units = values * (np.float32(1) / (values / np.float32(127)))
    (value,) = values[units > 127][:1]
    decoded = contract.round_trip(Blocks(8, rounding="stochastic"), np.full(1 << 20, value, np.float32))
    np.testing.assert_allclose(decoded, value, rtol=2.0**-22)


@pytest.mark.parametrize("codec", STOCHASTIC, ids=lambda codec: codec.name)
def test_seeds_make_a_difference(codec):
    x = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    first, second = (contract.encode(codec, x, seed=seed) for seed in (0, 1))
    assert (first != second).mean() > 0.1


@settings(deadline=None, max_examples=40)
@given(data=st.data(), levels=st.sampled_from([1, 15, 127]))
def test_the_unit_of_qsgd_is_the_norm_by_levels(data, levels):
    x = data.draw(contract.arrays(64, exponents=(-100, 127)))
    units, _ = split(contract.encode(QSGD(levels, 64), x), len(x), 64)
    padded = np.zeros(len(units) * 64)
    padded[: len(x)] = x
    expected = np.linalg.norm(padded.reshape(-1, 64), axis=1)
    # Squares, six additions, root, product and quotient are rounded, each by 2^-24. Underflow after the division
    # by the greatest is below 2^-126 of it. Norms beyond float32 are its greatest number.
    expected = np.minimum(expected, contract.GREATEST) / levels
    np.testing.assert_allclose(units, expected, rtol=16 * 2.0**-24, atol=2.0**-126)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    codec=st.sampled_from([Blocks(8, 64), Blocks(4, 64), *STOCHASTIC]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_rounding_errors_go_to_the_residual(data, codec, seed):
    x = data.draw(contract.arrays(64))
    contract.check_residual(codec, x, np.float32(0.3) * x[::-1].copy(), seed)


@pytest.mark.parametrize("culprit", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", [Blocks(8, 64), Blocks(4, 64), *STOCHASTIC], ids=lambda codec: codec.name)
def test_blocks_that_are_not_finite_stay_so(codec, culprit):
    contract.check_not_finite(codec, 64, culprit)


@pytest.mark.parametrize("codec", [Blocks(8), Blocks(4), Blocks(8, rounding="stochastic"), QSGD(1), QSGD()])
def test_the_greatest_numbers_do_not_overflow(codec):
    x = np.full(1000, contract.GREATEST, np.float32)
    x[::2] *= -1
    decoded = contract.round_trip(codec, x)
    if isinstance(codec, Blocks) or codec.levels == 1:  # then the norm, cut to float32's greatest, is all of a value
        np.testing.assert_allclose(decoded, x, rtol=2.0**-22)  # the limit of units is up to two places lower
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize(
    ("codec", "name", "bytes_of_513"),
    [
        (Blocks(), "int8", 3 * 4 + 513),
        (Blocks(4), "int4", 3 * 4 + 257),
        (Blocks(8, 512, "stochastic"), "int8:block=512,rounding=stochastic", 2 * 4 + 513),
        (QSGD(), "qsgd", 2 * 4 + 513),
        (QSGD(levels=7, bucket=128), "qsgd:levels=7,bucket=128", 5 * 4 + 513),
    ],
)
def test_codecs_have_names_and_payload_lengths(codec, name, bytes_of_513):
    assert isinstance(codec, Codec)
    assert (codec.name, codec.payload_bytes(513), codec.payload_bytes(0)) == (name, bytes_of_513, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks(6), "8 or 4 bits"),
        (lambda: Blocks(8, 20), "multiple of 8"),
        (lambda: Blocks(8, 0), "multiple of 8"),
        (lambda: Blocks(rounding="up"), "'up'"),
        (lambda: QSGD(128), "1 to 127"),
        (lambda: QSGD(bucket=-8), "bucket"),
    ],
)
def test_impossible_codecs_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(100)}, "x must be"),
        ({"x": np.zeros((10, 10), np.float32)}, "x must be"),
        ({"x": np.zeros(200, np.float32)[::2]}, "x must be"),
        ({"payload": np.zeros(200, np.int8)}, "payload must be"),
        ({"payload": np.zeros(103, np.uint8)}, "takes 104 bytes, but only 103"),
        ({"payload": np.frombuffer(bytes(200), np.uint8)}, "read-only"),
        ({"residual": (np.zeros(99, np.float32), np.zeros(99, np.float32))}, "have the length of x"),
        ({"residual": (np.zeros(100, np.float32), np.zeros(100))}, "the residual after"),
    ],
)
def test_wrong_arrays_are_not_encoded(change, message):
    arguments = {"x": np.zeros(100, np.float32), "payload": np.zeros(200, np.uint8), "residual": None, **change}
    with pytest.raises(UsageError, match=message):
        Blocks().encode(arguments["x"], arguments["payload"], residual=arguments["residual"])


def test_wrong_payloads_are_not_decoded():
    with pytest.raises(UsageError, match="takes 104 bytes, but only 103"):
        Blocks().decode(np.zeros(103, np.uint8), np.zeros(100, np.float32))
    with pytest.raises(UsageError, match="out must be"):
        Blocks().decode(np.zeros(104, np.uint8), np.zeros(100))
