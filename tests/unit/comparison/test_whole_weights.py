"""Gradients of whole weights are compared seldom, and at first often."""

from __future__ import annotations

from commlib.comparison.gradient_comparison import is_due


def test_gradients_are_compared_in_the_first_steps_and_every_64th() -> None:
    assert [step for step in range(1, 300) if is_due(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
