"""Fitting lines through measured times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.tune.fit import fit_gamma, fit_link

SIZES = [8 << 2 * power for power in range(10)]


@given(st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-7))
def test_exact_data_gives_exact_numbers(alpha: float, beta: float) -> None:
    link = fit_link([(n, alpha + beta * n) for n in SIZES])
    assert link.alpha == pytest.approx(alpha, rel=1e-6)
    assert link.beta == pytest.approx(beta, rel=1e-4)


def test_noise_on_large_messages_does_not_hide_alpha() -> None:
    """Ten percent of 2 MiB's time are 40 alphas: with absolute errors, alpha would be anything."""
    noise = random.Random(1)
    for _ in range(20):
        samples = [(n, (5e-6 + 1e-10 * n) * noise.uniform(0.9, 1.1)) for n in SIZES]
        link = fit_link(samples)
        assert link.alpha == pytest.approx(5e-6, rel=0.1)
        assert link.beta == pytest.approx(1e-10, rel=0.15)


def test_numbers_are_never_negative() -> None:
    assert fit_link([(1, 1.0), (1000, 0.5)]).beta == 0.0
    steep = fit_link([(100, 1e-9), (1000, 1e-7)])
    assert steep.alpha == 0.0 and steep.beta > 0
    flat = fit_link([(100, 2e-6), (200, 2e-6)])
    assert flat.alpha == pytest.approx(2e-6) and flat.beta == pytest.approx(0.0)


def test_gamma_excludes_the_cost_of_the_call() -> None:
    assert fit_gamma([(n, 3e-6 + 2e-11 * n) for n in SIZES]) == pytest.approx(2e-11)


@pytest.mark.parametrize("samples", [[], [(1, 1.0)], [(8, 1.0), (8, 2.0)]])
def test_one_size_does_not_give_a_line(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(UsageError, match="two sizes or more"):
        fit_link(samples)


def test_times_must_be_positive() -> None:
    with pytest.raises(UsageError, match="must be positive"):
        fit_link([(8, 0.0), (16, 1.0)])
