"""LossCheck: find batches whose loss is not the weighted sum of their microbatches' losses."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.pipeline.batch import shares
from commlib.pipeline.losses import (
    KEPT_BYTES,
    REMEDY,
    CheckSchedule,
    MicrobatchWeights,
    fault_in_sum,
    fault_in_terms,
    is_repeatable,
)
from commlib_torch.pipelines._batch_losses import Losses
from commlib_torch.pipelines._loss_calls import Count, as_numbers
from commlib_torch.pipelines._loss_copies import LossCopies, copy_values

OF_SUMMANDS = (
    "A loss with several summands, means over different numbers of terms, returns a dict of them; weigh= is one, too: "
    'weigh={"words": lambda target: (target != -100).sum(), "penalty": "rows"}'
)

BY_ROWS = "their rows"
"""How losses are weighted whose terms are unknown, for messages."""


class LossCheck:
    """Compares the losses of microbatches with the loss of several of them together, in some batches.

    It also compares the terms of all calls of torch's losses, if these do not determine the weights.
    """

    def __init__(self, copies: LossCopies) -> None:
        self._copies, self._looks = copies, CheckSchedule()
        self._may_count = True

    def begin(self, losses: Losses, microbatch: int, output: Any, counts: list[Count | None]) -> None:
        """Decide at the first microbatch of a batch whether the batch is compared. counts: the terms of its calls."""
        if counts and self._may_count:
            losses.calls[microbatch] = counts
        if not (losses.is_single or self._looks.has_ended):
            is_even = losses.weights is None or _are_by_rows(losses)
            losses.looks = self._looks.is_due(
                (_structure_key(output), _structure_key(losses.targets[microbatch]), is_even)
            )

    def keep(self, losses: Losses, microbatch: int, output: Any) -> None:
        """Keep a copy of a microbatch's output, if there is room."""
        outputs = losses.outputs
        if len(outputs) < 2 or (len(outputs) + 1) * _bytes(output) <= KEPT_BYTES:
            # A sent output is in memory that the next microbatch may overwrite, and a loss may work in place.
            outputs[microbatch] = copy_values(output)

    def fault(self, losses: Losses, by: str) -> str:
        """Return the error in the losses of a finished batch; "" if there is none, or it cannot be determined.

        by: how the losses were weighted.
        """
        fault, is_compared = self._fault_together(losses, by) if losses.looks else ("", False)
        if not fault:
            fault = self._fault_in_calls(losses.calls, losses, by) or self._fault_in_calls(losses.in_model, losses, by)
            if fault and is_compared and len(losses.outputs) == len(losses.values):
                self._may_count = False  # the whole batch shows that these calls do not matter
                return ""
        return f"{fault}. {OF_SUMMANDS}" if fault and not losses.summands else fault

    def _fault_in_calls(self, calls: Mapping[int, list[Count | None]], losses: Losses, by: str) -> str:
        if not calls or not self._may_count or losses.weights is None:
            return ""
        weights = MicrobatchWeights(tuple(losses.weights.terms[number] for number in calls), losses.weights.is_sum)
        for counts in zip(*calls.values(), strict=False):
            known = [count for count in counts if count is not None]
            if len(known) == len(counts) and (fault := fault_in_terms(as_numbers(known), weights, by=by)):
                return fault
        return ""

    def _fault_together(self, losses: Losses, by: str) -> tuple[str, bool]:
        """Compare the loss of several microbatches together with their own; return (error, whether it was decided)."""
        numbers = list(losses.outputs)
        if losses.weights is None or len(numbers) < 2:
            return "", False
        epsilon = torch.finfo(losses.values[numbers[0]].dtype).eps
        try:
            again, whole = self._copies.losses_together(losses, numbers)
        except Exception:  # a loss that fails for several microbatches cannot be compared
            kinds = {tuple(map(_trailing, pytree.tree_leaves(losses.outputs[number]))) for number in numbers}
            if len(kinds) < 2 or by != BY_ROWS or losses.weights.is_sum:
                return "", False
            return (
                f"pipeline: microbatches have outputs of different lengths, and were weighted by {by}: {REMEDY}"
            ), True
        summands = {name: (losses.of_summands[name], one) for name, one in losses.summands.items()}
        for name, (values, weights) in (summands or {"": (losses.values, losses.weights)}).items():
            own = [float(values[number]) for number in numbers]
            if not is_repeatable(own[0], again[name], epsilon):
                self._looks.end()
                return "", False
            weights = MicrobatchWeights(tuple(weights.terms[number] for number in numbers), weights.is_sum)
            of = f"{by} of {name}" if name else by
            if fault := fault_in_sum(whole[name], own, weights, epsilon, by=of):
                return fault, True
        return "", True


def _are_by_rows(losses: Losses) -> bool:
    """Return whether all weights in a batch equal those by rows: only other batches then reveal different terms."""
    by_rows = shares(losses.rows)
    every = [losses.weights] if not losses.summands else losses.summands.values()
    return all(one is None or one.is_sum or are_close(one.in_batch(), by_rows) for one in every)


def are_close(shares: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether weights are equal except for rounding."""
    return all(abs(one - other) < 1e-9 for one, other in zip(shares, others, strict=True))


def _structure_key(value: Any) -> Hashable:
    """Return a key for the structure of a batch, independent of its size."""
    if isinstance(value, Tensor):
        return value.ndim, value.dtype
    leaves, spec = pytree.tree_flatten(value)
    return (str(spec), *((leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves))


def _trailing(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape[1:]) if isinstance(leaf, Tensor) else ()


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
