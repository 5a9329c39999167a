"""LossTerms: learn from calls of torch's losses how many terms each microbatch's loss has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.errors import UsageError
from commlib.pipeline.isolate import isolate
from commlib.pipeline.losses import MicrobatchWeights, weights_of
from commlib_torch.pipelines._batch_losses import Losses
from commlib_torch.pipelines._loss_calls import Count, CountRule, LossCall, LossCalls, is_view, rules_of
from commlib_torch.pipelines._loss_check import LossCheck, are_close
from commlib_torch.pipelines._loss_copies import LossCopies, copy_values, parameters_of, same_random_numbers


class LossTerms:
    """Sets the weights of a batch from the recorded loss of its first microbatch.

    If that is one call of torch's losses of a tensor of the target, a rule counts the terms of all microbatches in
    their targets. All other losses are weighted by rows, and checked.
    """

    def __init__(self, copies: LossCopies, check: LossCheck) -> None:
        self._copies, self._check = copies, check
        self.rule: CountRule | None = None
        self._has_warned = False

    def learn(
        self, losses: Losses, microbatch: int, output: Any, target: Any, calls: list[LossCall], loss: Tensor
    ) -> None:
        """Learn the weights from the calls of torch's losses in a microbatch's loss."""
        counts = counts_of(calls)
        if losses.calls:  # uncertain in the first microbatch
            losses.calls[microbatch] = counts
            return
        rules, is_certain = list[CountRule](), False
        if calls:
            call = calls[0]
            is_whole = call.result is loss and len(calls) == 1
            rules, is_certain = rules_of(call, target)
            is_certain = is_certain and is_whole and _is_of(call.input, output)
            if call.reduction == "none" or (call.reduction == "sum" and not is_whole):
                rules = []
        rule = rules[0] if rules else None
        if rule is None:
            is_sum = any(loss is one for one in losses.sums)
            losses.weights, self.rule = weights_of(losses.rows, losses.rows, is_sum=is_sum), None
            if losses.sums and not is_sum:
                self._warn_of_sums()
        elif len(rules) > 1 and (weights := self._weights_of_several(losses, microbatch, output, rules, counts)):
            losses.weights, self.rule = weights, None
        elif losses.weights is None or not rule.equals(self.rule):
            losses.weights, self.rule = _weights_by(rule, losses), rule
        if not is_certain:
            self._check.begin(losses, microbatch, output, counts)

    def learn_of_marked(
        self, losses: Losses, microbatch: int, output: Any, calls: list[LossCall], loss: Tensor
    ) -> None:
        """Learn the weights of a loss that changes its target in place, such as `y[y == pad] = -100`.

        The targets of later microbatches are not changed yet, so terms cannot be counted in them: the loss is called
        once on a copy of each, with the first microbatch's output, and all calls are compared with this result.
        """
        counts = counts_of(calls)
        if losses.calls:  # uncertain in the first microbatch
            losses.calls[microbatch] = counts
            return
        losses.weights, self.rule = weights_of(losses.rows, losses.rows), None
        is_whole = len(calls) == 1 and calls[0].result is loss
        if is_whole and calls[0].reduction == "sum":
            losses.weights = weights_of(losses.rows, losses.rows, is_sum=True)
        elif is_whole and counts[0] is not None:
            losses.weights = self._copies.weights(losses, microbatch, output, counts[0])
        self._check.begin(losses, microbatch, output, counts)

    def learn_from_original(self, original: Callable[..., Any], losses: Losses, microbatch: int, output: Any) -> None:
        """Learn the weights from the original of a compiled loss."""
        losses.weights = weights_of(losses.rows, losses.rows)
        given, target = copy_values(output), copy_values(losses.targets[microbatch])
        before = versions_of(target)
        try:
            original = isolate(original, parameters_of(original))
            with LossCalls() as calls, torch.no_grad(), same_random_numbers(given):
                value = original(given) if target is None else original(given, target)
        except Exception:  # it is unknown then
            return
        value = value[0] if isinstance(value, tuple) else value
        if before == versions_of(target):
            self.learn(losses, microbatch, given, target, calls.recorded, value)
        else:
            self.learn_of_marked(losses, microbatch, given, calls.recorded, value)
        losses.calls.clear()

    def apply_rule(self, losses: Losses) -> None:
        """Set the weights of a batch before its first loss, by the rule of earlier ones, if it holds.

        The host then waits for a GPU before the first microbatch instead of after it.
        """
        if self.rule is not None:
            try:
                losses.weights = _weights_by(self.rule, losses)
            except Exception:  # of a target that differs from the last one
                self.rule = None

    def _weights_of_several(
        self, losses: Losses, microbatch: int, output: Any, rules: Sequence[CountRule], counts: Sequence[Count | None]
    ) -> MicrobatchWeights | None:
        """Return weights when the first microbatch cannot show which of several tensors of the target holds the terms.

        For example weights and a mask that are all ones there. None if it makes no difference, or stays undecided.
        """
        candidates = [_weights_by(rule, losses).in_batch() for rule in rules]
        if len(counts) != 1 or counts[0] is None or all(map(partial(are_close, candidates[0]), candidates[1:])):
            return None
        try:
            return self._copies.weights(losses, microbatch, output, counts[0])
        except UsageError:  # all calls are compared with the first one's
            return None

    def _warn_of_sums(self) -> None:
        """Warn once of a loss built on a sum within the model: whether it is itself a sum is unknown."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                'pipeline: the model computes a loss with reduction="sum" and derives its own from it; the losses of '
                'microbatches are weighted by their rows, like means: pass weigh="sum" to pipeline() if they are '
                'sums, and weigh="rows" if they are means',
                stacklevel=2,
            )


def _weights_by(rule: CountRule, losses: Losses) -> MicrobatchWeights:
    counts = iter(rule.counts([target for target, count in zip(losses.targets, losses.rows, strict=True) if count]))
    return weights_of([next(counts) if count else 0.0 for count in losses.rows], losses.rows, is_sum=rule.is_sum)


def counts_of(calls: Sequence[LossCall]) -> list[Count | None]:
    """Return the terms of means; None for other losses."""
    return [call.count if call.reduction not in ("sum", "none") else None for call in calls]


def versions_of(value: Any) -> list[int]:
    """Return the autograd versions of the tensors of a value."""
    if isinstance(value, Tensor):
        return [] if value.is_inference() else [value._version]
    return [one._version for one in pytree.tree_leaves(value) if isinstance(one, Tensor) and not one.is_inference()]


def _is_of(one: Tensor, output: Any) -> bool:
    """Return whether a tensor is an output or a view of all of it."""
    return any(is_view(one, leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
