"""Signs and mean magnitudes against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.codec import Codec
from commlib.compress.codecs.sign import Sign
from commlib.errors import UsageError
from tests.unit.compress.codecs import contract


@settings(deadline=None, max_examples=80)
@given(data=st.data(), block=st.sampled_from([8, 40, 1024]))
def test_decoded_values_are_signs_times_the_mean_magnitude(data, block):
    x = data.draw(contract.arrays(block, exponents=(-149, 127)))
    codec = Sign(block)
    decoded = contract.round_trip(codec, x)
    assert len(contract.encode(codec, x)) == 4 * -(-len(x) // block) + -(-len(x) // 8)
    for start in range(0, len(x), block):
        part, mine = x[start : start + block], decoded[start : start + block]
        np.testing.assert_array_equal(np.signbit(mine), np.signbit(part))
        magnitude = np.abs(mine)
        assert (magnitude == magnitude[0]).all()
        mean = np.abs(part.astype(np.float64)).mean()
        if magnitude[0]:
            # One share of up to 1024, its product and ten additions are rounded, each by 2^-24, and products that are
            # denormal by 2^-150 each.
            np.testing.assert_allclose(magnitude[0], mean, rtol=2.0**-20, atol=len(part) * 2.0**-150)
            assert magnitude[0] >= contract.LEAST_NORMAL
        else:
            assert mean < contract.LEAST_NORMAL * (1 + 2.0**-12)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), block=st.sampled_from([8, 64]))
def test_rounding_errors_go_to_the_residual(data, block):
    x = data.draw(contract.arrays(block))
    contract.check_residual(Sign(block), x, np.float32(0.3) * x[::-1].copy(), 0)


def test_feedback_corrects_the_errors_of_one_bit():
    """The sum of sent values follows the sum of the values, as the residual is bounded: also for the zeros.

    Of a block of n with norm |v| a sign leaves |v|² - |v|₁²/n <= (1 - 1/n) |v|². So with |g| the norm of a gradient,
    residuals stay below |g| c / (1 - c), c = sqrt(1 - 1/n); Karimireddy et al. 2019, lemma 3.
    """
    gradient = np.array([1, 0, -2, 0.5, 0, 0, 0.25, -1], np.float32)
    codec, residual, total_sent = Sign(8), np.zeros(8, np.float32), np.zeros(8)
    contraction = (1 - 1 / 8) ** 0.5
    bound = np.linalg.norm(gradient) * contraction / (1 - contraction)
    steps = 2000
    for _ in range(steps):
        total_sent += contract.decode(codec, contract.encode(codec, gradient, residual=(residual, residual)), 8)
        assert np.linalg.norm(residual) <= bound
    np.testing.assert_allclose(total_sent / steps, gradient, atol=bound / steps + 1e-5)


@pytest.mark.parametrize("culprit", [np.inf, -np.inf, np.nan])
def test_blocks_that_are_not_finite_stay_so(culprit):
    contract.check_not_finite(Sign(64), 64, culprit)


def test_the_greatest_numbers_do_not_overflow():
    for count in (*range(1, 100), 3000):  # some shares are rounded up
        x = np.full(count, contract.GREATEST, np.float32)
        x[::3] *= -1
        np.testing.assert_allclose(contract.round_trip(Sign(), x), x, rtol=2.0**-20)


def test_sign_has_a_name_and_refuses_wrong_options():
    assert isinstance(Sign(), Codec)
    assert (Sign().name, Sign(64).name, Sign().payload_bytes(1025)) == ("sign", "sign:block=64", 8 + 129)
    with pytest.raises(UsageError, match="multiple of 8"):
        Sign(100)
    with pytest.raises(UsageError, match="payload"):
        Sign().encode(np.zeros(100, np.float32), np.zeros(16, np.uint8))
