"""Naps grow with the wait: short waits end at once, long ones leave the core to others."""

from __future__ import annotations

import pytest

from commlib.transport.naps import LONGEST_NAP, SHORTEST_NAP, kernel_naps, nap_seconds


@pytest.mark.parametrize("waited", [0.0, 1e-3, 0.02, 0.1, 1.0, 3600.0])
def test_a_nap_delays_a_wait_by_half_a_per_cent_at_most(waited):
    nap = nap_seconds(waited)
    assert SHORTEST_NAP <= nap <= LONGEST_NAP
    assert nap <= max(waited / 200, SHORTEST_NAP)


def test_naps_grow_up_to_the_longest():
    assert [nap_seconds(waited) for waited in (0, 0.1, 0.2, 1)] == pytest.approx([50e-6, 0.5e-3, 1e-3, 2e-3])


@pytest.mark.parametrize("waited", [0.0, 0.02, 0.1, 1.0, 3600.0])
def test_a_compiled_loop_returns_for_its_checks_within_10_ms(waited):
    count, microseconds = kernel_naps(waited)
    assert 1000 <= count * microseconds <= 10_000


def test_a_wait_of_seconds_takes_one_per_cent_of_a_core():
    naps, waited = 0, 0.0
    while waited < 5:
        count, microseconds = kernel_naps(waited)
        naps, waited = naps + count, waited + count * (microseconds + 15) * 1e-6
    assert naps * 15e-6 < 0.01 * 5
