"""Casts to 16 and 8 bits against numpy's and ml_dtypes' own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.codec import Codec
from commlib.compress.codecs.cast import Cast, Float8
from commlib.errors import UsageError
from commlib.kernels.host.convert import convert
from tests.unit.compress.codecs import contract

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SMALL = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TOPS = {"e4m3": 448, "e5m2": 57344}
# Mantissa bits, and the least denormal number.
PRECISION = {"e4m3": (3, 2.0**-9), "e5m2": (2, 2.0**-16)}


def same_bits(decoded, expected):
    """Compare bits; the payload of a NaN may differ between conversions."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(decoded), nan)
    unsigned = f"u{decoded.dtype.itemsize}"
    np.testing.assert_array_equal(decoded.view(unsigned)[~nan], expected.view(unsigned)[~nan])


def hard_cases(dtype):
    """All numbers of a half precision, the midpoints between them, the neighbours of these, and arbitrary bits."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    numbers.sort()
    with np.errstate(all="ignore"):
        ties = (numbers[1:].astype(np.float64) + numbers[:-1]) / 2
        ties = np.append(ties, [65520, -65520]).astype(np.float32)  # half way to where float16 ends
        near = [np.nextafter(ties, infinity) for infinity in np.array([np.inf, -np.inf], np.float32)]
    anything = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    return np.concatenate([numbers, ties, *near, anything])


@pytest.mark.parametrize("name", HALVES)
def test_conversions_match_numpy(name):
    dtype = HALVES[name]
    x = hard_cases(dtype)
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    rounded = np.empty_like(expected)
    convert(x, rounded)
    same_bits(rounded, expected)
    back = np.empty_like(x)
    convert(expected, back)
    same_bits(back, expected.astype(np.float32))


def test_unsupported_conversions_are_refused():
    single, half = np.zeros((4, 6), np.float32), np.zeros((4, 6), np.float16)
    convert(single, half)
    with pytest.raises(UsageError, match="contiguous"):
        convert(single[:, ::2], half[:, ::2])
    with pytest.raises(UsageError, match="arrays of the same size"):
        convert(single, half[:2])
    for other in (np.zeros((4, 6), np.float64), single):
        with pytest.raises(UsageError, match="float32 and one of"):
            convert(single, other)
    half.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        convert(single, half)


@pytest.mark.parametrize("name", HALVES)
def test_a_cast_is_a_codec(name):
    codec, dtype = Cast(name), HALVES[name]
    assert isinstance(codec, Codec) and codec.payload_bytes(7) == 14
    x = hard_cases(dtype)
    payload = contract.encode(codec, x)
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    same_bits(np.frombuffer(payload.tobytes(), dtype), expected)
    same_bits(contract.decode(codec, payload, len(x)), expected.astype(np.float32))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), name=st.sampled_from(list(HALVES)), seed=st.integers(-(2**63), 2**63 - 1))
def test_rounding_errors_of_a_cast_go_to_the_residual(data, name, seed):
    x = data.draw(contract.arrays(1024))
    before = np.float32(0.01) * x[::-1].copy()
    contract.check_residual(Cast(name), x, before, seed)


@pytest.mark.parametrize("codec", [Cast("float16"), Cast("bfloat16")])
def test_elements_that_are_not_finite_stay_so_and_leave_their_residuals(codec):
    x = np.array([1, np.inf, -np.inf, np.nan, 3.3e38, 0.1] * 300, np.float32)
    before = np.full_like(x, 1e38)  # so the fifth overflows as well
    decoded = contract.decode(codec, contract.encode(codec, x, residual=(before, before)), len(x))
    np.testing.assert_array_equal(
        np.isfinite(decoded[:6]), [codec.dtype == "bfloat16", *[False] * 4, decoded[0] < np.inf]
    )
    assert (before[~np.isfinite(decoded)] == np.float32(1e38)).all()


def scaled(name, x, block):
    """Float8's definition in numpy, block by block: (units, codes as ml_dtypes' numbers)."""
    units, codes = [], []
    top = np.float32(TOPS[name])
    least = np.float32(2.0**-126 / PRECISION[name][1])
    limit = np.nextafter(np.float32(contract.GREATEST) / top, np.float32(0))
    for start in range(0, len(x), block):
        part = x[start : start + block]
        unit = min(np.abs(part).max() / top, limit)
        unit = unit if unit >= least else np.float32(0)
        inverse = np.float32(1) / unit if unit else np.float32(0)
        units.append(unit)
        codes.append((part * inverse).astype(SMALL[name]))
    return np.array(units, np.float32), np.concatenate([np.empty(0, SMALL[name]), *codes])


@settings(deadline=None, max_examples=60)
@given(data=st.data(), name=st.sampled_from(list(SMALL)), block=st.sampled_from([8, 40, 1024]))
def test_small_floats_match_ml_dtypes_times_a_unit(data, name, block):
    x = data.draw(contract.arrays(block))
    codec = Float8(name, block)
    payload = contract.encode(codec, x)
    units, codes = scaled(name, x, block)
    assert payload.tobytes() == units.tobytes() + codes.tobytes()
    decoded = contract.decode(codec, payload, len(x))
    unit = np.repeat(units, block)[: len(x)]
    np.testing.assert_array_equal(decoded, codes.astype(np.float32) * unit)
    # Half of the last place of the mantissa, or of the least denormal; in between inverse, product and product again
    # are rounded, each by 2^-24 of the value.
    mantissa, denormal = PRECISION[name]
    size = np.abs(x.astype(np.float64))
    bound = np.maximum(size * 2.0 ** -(mantissa + 1), unit * denormal / 2) + size * 2.0**-22
    assert (np.abs(decoded - x)[unit > 0] <= bound[unit > 0]).all()
    assert (decoded[unit == 0] == 0).all()
    assert not ((decoded != 0) & (np.abs(decoded) < contract.LEAST_NORMAL)).any()


@pytest.mark.parametrize("name", SMALL)
def test_every_code_decodes_to_its_number(name):
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[np.isfinite(codes.view(SMALL[name]).astype(np.float32))]
    codec = Float8(name)
    payload = np.concatenate([np.array([0.75], np.float32).view(np.uint8), codes])
    expected = codes.view(SMALL[name]).astype(np.float32) * np.float32(0.75)
    same_bits(contract.decode(codec, payload, len(codes)), expected)


@pytest.mark.parametrize("name", SMALL)
def test_ties_of_small_floats_go_to_the_even_one(name):
    numbers = np.arange(256, dtype=np.uint8).view(SMALL[name]).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, -np.float32(np.inf))])
    x = np.append(x, [numbers.max()]) * np.float32(2)  # so the unit is 2
    assert len(x) < 1024
    np.testing.assert_array_equal(contract.round_trip(Float8(name), x), 2 * (x / 2).astype(SMALL[name]).astype(float))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), name=st.sampled_from(list(SMALL)))
def test_rounding_errors_of_small_floats_go_to_the_residual(data, name):
    x = data.draw(contract.arrays(64))
    contract.check_residual(Float8(name, 64), x, np.float32(0.3) * x[::-1].copy(), 0)


@pytest.mark.parametrize("culprit", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", SMALL)
def test_blocks_that_are_not_finite_stay_so(name, culprit):
    contract.check_not_finite(Float8(name, 64), 64, culprit)


def test_wrong_casts_are_refused():
    with pytest.raises(UsageError, match="'float32'"):
        Cast("float32")
    with pytest.raises(UsageError, match="'e3m4'"):
        Float8("e3m4")
    with pytest.raises(UsageError, match="multiple of 8"):
        Float8(block=12)
    assert (Cast().name, Cast("bfloat16").name, Float8().name, Float8("e5m2", 64).name) == (
        "fp16",
        "bf16",
        "fp8_e4m3",
        "fp8_e5m2:block=64",
    )
