"""Losses: call the loss of a pipeline's microbatches, and find out the weight of each in the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.errors import UsageError
from commlib.pipeline.losses import Weigher, weights_of
from commlib.pipeline.rows import Rows
from commlib_torch._graph_breaks import unwrap_compiled
from commlib_torch.pipelines._batch_losses import Losses
from commlib_torch.pipelines._loss_calls import LossCalls, Manner, is_same
from commlib_torch.pipelines._loss_check import BY_ROWS, LossCheck
from commlib_torch.pipelines._loss_copies import LossCopies
from commlib_torch.pipelines._loss_terms import LossTerms, counts_of, versions_of
from commlib_torch.pipelines._parts import OUTPUT

Loss = Callable[..., Any]
"""A function of (output, target) that returns a loss, a dict of summands, or (either of these, metrics)."""


class LossWeights:
    """Calls a loss, and weighs those of microbatches in the batch.

    Weights given by the user are used as they are. Otherwise the first microbatch's call is recorded: see `LossTerms`.
    If it does not determine the weights, all calls of torch's losses are recorded, and in some batches the loss of
    several microbatches together is compared with their own losses: see `LossCheck`.
    """

    def __init__(self, loss: Loss | None, weigher: Weigher, rows: Rows) -> None:
        self.loss, self.weigher, self.rows = loss, weigher, rows
        copies = LossCopies(loss, rows)
        self._check = LossCheck(copies)
        self._terms = LossTerms(copies, self._check)
        self._manner: Manner | None = None
        """The loss call from which the rule was learned: the rule holds while later calls are the same."""
        self._gives_number: bool | None = None
        # A compiled function cannot be recorded; its original is, once, in an additional call.
        self._original: Loss | None = getattr(loss, "_torchdynamo_orig_callable", None)
        if unwrap_compiled(loss) is not loss:
            self._original = unwrap_compiled(loss)

    def begin(self, rows: Sequence[int], targets: Sequence[Any], inputs: Sequence[Any], every: int = 0) -> Losses:
        """Begin a batch. inputs: if they are known here. every: microbatches between updates, as in schedules."""
        losses = Losses(rows, targets, every)
        if self.weigher.is_set:
            losses.weights = self.weigher.weights(rows, targets, inputs)
            losses.summands = {name: one.weights(rows, targets, inputs) for name, one in self.weigher.summands.items()}
        elif losses.is_single:
            losses.weights = weights_of(rows, rows)
        else:
            self._terms.apply_rule(losses)
        return losses

    def call(self, losses: Losses, microbatch: int, output: Any) -> Tensor | None:
        """Return the loss of a microbatch; None if its weight is zero."""
        is_first = not losses.values
        watches = not losses.is_single and not self.weigher.is_set and (is_first or bool(losses.calls))
        if not watches:
            loss = self._call_loss(losses, microbatch, output)
            if is_first and self.weigher.is_checked:
                self._check.begin(losses, microbatch, output, [])
        elif self._original is None:
            target = losses.targets[microbatch]
            before = versions_of(target)
            with LossCalls() as calls:
                loss = self._call_loss(losses, microbatch, output)
            if before == versions_of(target):
                manner = calls.alone(output, target, loss)
                if not is_first or losses.weights is None or not is_same(manner, self._manner):
                    self._terms.learn(losses, microbatch, output, target, calls.recorded, loss)
                    self._manner = manner if self._terms.rule is not None else None
            else:
                self._terms.learn_of_marked(losses, microbatch, output, calls.recorded, loss)
        else:
            if losses.weights is None:
                self._terms.learn_from_original(self._original, losses, microbatch, output)
            loss = self._call_loss(losses, microbatch, output)
        if losses.looks:
            self._check.keep(losses, microbatch, output)
        losses.values[microbatch] = losses.total_of_summands(microbatch) if losses.summands else loss.detach()
        assert losses.weights is not None
        return loss if losses.weights.terms[microbatch] else None

    def _call_loss(self, losses: Losses, microbatch: int, output: Any) -> Tensor:
        assert self.loss is not None
        target = losses.targets[microbatch]
        loss = self.loss(output) if target is None else self.loss(output, target)
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, losses.metrics[microbatch] = loss[0], pytree.tree_map_only(Tensor, Tensor.detach, loss[1])
        if isinstance(loss, Mapping) or losses.summands:
            return losses.add_summands(microbatch, loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"pipeline: the loss is {kind}, expected a tensor with one element, or that and a dict of metrics"
            )
        return loss

    def fault(self, losses: Losses) -> str:
        """Return the error in the losses of a finished batch; "" if there is none, or it cannot be determined."""
        by = "what weigh= says" if self.weigher.is_set else "the terms of its target" if self._terms.rule else BY_ROWS
        return self._check.fault(losses, by)

    # Losses computed by the model: the user's function takes them from the model's output

    def is_in_model(self, losses: Losses) -> bool:
        """Return whether the last stage may compute the loss itself: there is no target, and its output is a number."""
        if self.weigher.is_set or losses.is_single or losses.targets[0] is not None:
            return False
        return self._gives_number is not False

    def call_in_model(self, losses: Losses, microbatch: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the output of a stage, and count the terms of torch's losses that it calls."""
        with LossCalls() as calls:
            results = run()
        if self._gives_number is None:
            leaves = [leaf for leaf in pytree.tree_leaves(results[OUTPUT]) if isinstance(leaf, Tensor)]
            self._gives_number = any(not leaf.ndim and leaf.is_floating_point() for leaf in leaves)
        if self._gives_number:
            losses.in_model[microbatch] = counts_of(calls.recorded)
            if not losses.values:
                losses.sums = [call.result for call in calls.recorded if call.reduction == "sum"]
        return results


def total_of(loss: Any) -> Any:
    """Return the loss in a function's result: without metrics, or the sum of summands."""
    loss = loss[0] if isinstance(loss, tuple) else loss
    return sum(loss.values()) if isinstance(loss, Mapping) else loss
