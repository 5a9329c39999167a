"""Weights of microbatches' losses, the user's settings for them, and a check that finds losses that are no mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.pipeline.losses import (
    CheckSchedule,
    MicrobatchWeights,
    Weigher,
    fault_in_sum,
    fault_in_terms,
    is_repeatable,
    weights_of,
)


def test_a_microbatch_without_terms_has_no_weight() -> None:
    weights = weights_of([3, 0, 1], [2, 2, 2])
    assert weights.in_batch() == [0.75, 0.0, 0.25]
    assert weights.in_updates(2) == [1.0, 0.0, 1.0]
    assert weights_of([4, 0, 0], [4, 4, 0], is_sum=True).in_batch() == [1.0, 0.0, 0.0]


def test_a_batch_without_terms_matches_one_process() -> None:
    assert weights_of([0, 0], [3, 1]).in_batch() == [0.75, 0.25]
    # The batch is one microbatch without rows: its loss may be 0/0, as in one process.
    assert weights_of([0, 0], [0, 0]).in_batch() == [1.0, 0.0]


FUNCTIONS: list[Any] = [
    (lambda target: len(target), [2, 1]),
    (lambda target, factor=3: len(target) * factor, [6, 3]),
    (lambda target, x: len(target) + len(x), [12, 11]),
    (lambda target, x, weights: len(target) + float(sum(weights)), [2.5, 1.5]),
    (lambda target, sample_weight: float(sum(sample_weight)), [0.5, 0.5]),
    (lambda target, *, inputs: len(inputs), [10, 10]),
    (lambda target, sample_weight=None, inputs=None: len(inputs) + float(sum(sample_weight)), [10.5, 10.5]),
    (np.size, [2, 1]),
]


@pytest.mark.parametrize("place", range(len(FUNCTIONS)))
def test_weigh_gets_the_arguments_it_accepts(place: int) -> None:
    function, expected = FUNCTIONS[place]
    given = [[1, 1], [1]], ["x" * 10, "x" * 10], [[0.25, 0.25], [0.5]]
    assert Weigher(function).weights([2, 1], *given).terms == tuple(expected)


def test_invalid_weights_are_refused() -> None:
    assert Weigher("rows").weights([2, 1], [], []) == MicrobatchWeights((2.0, 1.0))
    assert Weigher("sum").weights([2, 1], [], []).in_batch() == [1.0, 1.0]
    assert not Weigher("sum").is_checked and Weigher(len).is_checked
    with pytest.raises(UsageError, match="weigh is 3"):
        Weigher(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"weigh= returned -1\.0 for microbatch 1"):
        Weigher(lambda target: target).weights([2, 1], [1, -1], [])
    with pytest.raises(UsageError, match="returned nan"):
        Weigher(lambda target: math.nan).weights([2, 1], [1, 1], [])
    with pytest.raises(UsageError, match="pass x on the rank of the last stage"):
        Weigher(lambda target, inputs: 1).weights([2, 1], [1, 1], [])


def test_few_batches_are_checked() -> None:
    looks = CheckSchedule()
    assert [number for number in range(1, 1002) if looks.is_due("kind")] == [1, 2, 10, 100, 1000]
    assert looks.is_due("another kind")


def test_a_check_finds_losses_that_are_no_mean() -> None:
    weights, epsilon = MicrobatchWeights((3.0, 1.0)), 2.2e-16
    assert not fault_in_sum(1.75, [2.0, 1.0], weights, epsilon, by="their rows")
    assert not fault_in_sum(1.75 + 1e-13, [2.0, 1.0], weights, epsilon, by="their rows")
    assert 'pass weigh="sum"' in fault_in_sum(3.0, [2.0, 1.0], weights, epsilon, by="their rows")
    fault = fault_in_sum(1.6, [2.0, 1.0], weights, epsilon, by="their rows")
    assert (
        "together is 1.6, but their separate losses sum to 1.75, weighted by their rows" in fault and "weigh=" in fault
    )
    assert fault_in_sum(1.6, [2.0, math.nan], weights, epsilon, by="their rows")
    assert not fault_in_sum(2.0, [2.0, math.nan], MicrobatchWeights((3.0, 0.0)), epsilon, by="their rows")
    assert not fault_in_sum(math.nan, [2.0, math.nan], weights, epsilon, by="their rows")
    assert not fault_in_sum(1.751, [2.0, 1.0], weights, 7.8e-3, by="their rows")  # bfloat16


def test_wrong_numbers_of_terms_are_detected() -> None:
    assert not fault_in_terms([6, 2], MicrobatchWeights((3.0, 1.0)), by="their rows")
    assert not fault_in_terms([0, 0], MicrobatchWeights((3.0, 1.0)), by="their rows")
    assert "means of 6, 1 terms" in fault_in_terms([6, 1], MicrobatchWeights((3.0, 1.0)), by="their rows")


def test_an_ended_schedule_checks_nothing():
    looks = CheckSchedule()
    assert looks.is_due("a") and not looks.has_ended
    looks.end()
    assert not looks.is_due("a") and not looks.is_due("b") and looks.has_ended


def test_a_loss_is_repeatable_up_to_rounding():
    assert is_repeatable(1.0, 1.0 + 1e-9, 1e-7) and not is_repeatable(1.0, 1.1, 1e-7)
    assert is_repeatable(float("nan"), 1.0, 1e-7)  # a check of the sum reports it
