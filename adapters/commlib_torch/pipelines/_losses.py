"""Losses: call the loss of a pipeline's microbatches, and find out the weight of each in the loss of the batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.errors import UsageError
from commlib.pipeline.batch import shares
from commlib.pipeline.isolate import isolate
from commlib.pipeline.losses import (
    REMEDY,
    CheckSchedule,
    MicrobatchWeights,
    Weigher,
    fault_in_sum,
    fault_in_terms,
    is_close,
    weights_of,
)
from commlib.pipeline.rows import Rows
from commlib_torch._graph_breaks import unwrap_compiled
from commlib_torch.pipelines._batches import join_microbatches, take_rows
from commlib_torch.pipelines._loss_calls import (
    Count,
    CountRule,
    LossCall,
    LossCalls,
    Manner,
    as_numbers,
    is_same,
    is_view,
    rules_of,
)
from commlib_torch.pipelines._parts import OUTPUT

Loss = Callable[..., Any]
"""A function of (output, target) that returns a loss, a dict of summands, or (either of these, metrics)."""

KEPT = 256 << 20
"""Upper limit of the bytes of kept outputs for comparing the loss of several microbatches; two are always kept."""


OF_SUMMANDS = (
    "A loss with several summands, means over different numbers of terms, returns a dict of them; weigh= is one, too: "
    'weigh={"words": lambda target: (target != -100).sum(), "penalty": "rows"}'
)


@dataclass(slots=True)
class Losses:
    """The losses of a batch's microbatches, on the rank of the last stage.

    rows: of each microbatch. weights: their weights in the batch; unknown until the first loss, unless the user gives
    them.
    """

    rows: Sequence[int]
    targets: Sequence[Any]
    every: int
    weights: MicrobatchWeights | None = None
    values: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    calls: dict[int, list[Count | None]] = field(default_factory=dict)
    """The terms of torch's losses that were called, if their weights are uncertain."""
    in_model: dict[int, list[Count | None]] = field(default_factory=dict)
    """The same for losses called by the last stage."""
    sums: list[Tensor] = field(default_factory=list)
    """Calls of torch's losses with reduction="sum" in the first microbatch of the last stage."""
    summands: dict[str, MicrobatchWeights] = field(default_factory=dict)
    """The weights of each summand, for a loss that is a dict of summands."""
    of_summands: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Their values by microbatch."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """The outputs of the first microbatches, if they are compared."""
    looks: bool = False
    is_single: bool = field(init=False)
    """Whether at most one microbatch has rows: its loss is the batch's."""

    _shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_single = sum(map(bool, self.rows)) < 2

    @property
    def shares(self) -> list[float]:
        """The weight of each loss in its update, once there is a loss."""
        if not self._shares and self.weights is not None:
            self._shares = self.weights.in_updates(self.every)
        return self._shares

    def mean(self, values: Mapping[int, Any]) -> Any:
        """Return the mean of values of microbatches, weighted like their losses; 0 for no values."""
        return self._weighted(values, self.weights)

    def mean_metric(self, values: Mapping[int, Any]) -> Any:
        """Return the mean of a metric, weighted like the losses; if losses have summands, by rows."""
        return self._weighted(values, weights_of(self.rows, self.rows) if self.summands else self.weights)

    def _weighted(self, values: Mapping[int, Any], weights: MicrobatchWeights | None) -> Any:
        counts = weights.in_batch() if weights is not None else []
        return sum(value * counts[number] for number, value in sorted(values.items()) if counts[number])


class LossWeights:
    """Finds the weights of microbatches' losses in the batch, across batches.

    Weights given by the user are used as they are. Otherwise the first microbatch's call is recorded: if it is one of
    torch's losses of a tensor of the target, the target determines how to count the terms of all microbatches. All
    other losses are weighted by rows; then all calls of torch's losses are recorded, and in some batches the loss of
    several microbatches together is compared with their own losses.
    """

    def __init__(self, loss: Loss | None, weigher: Weigher, rows: Rows) -> None:
        self.loss, self.weigher, self.rows = loss, weigher, rows
        self._looks = CheckSchedule()
        self._rule: CountRule | None = None
        self._manner: Manner | None = None
        """The loss call from which the rule was learned: the rule holds while later calls are the same."""
        self._may_look, self._may_count = True, True
        self._gives_number: bool | None = None
        self._has_warned = False
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
        elif self._rule is not None:  # the host waits for a GPU before the first microbatch instead of after it
            try:
                losses.weights = self._apply_rule(losses, self._rule)
            except Exception:  # of a target that differs from the last one
                self._rule = None
        return losses

    def call(self, losses: Losses, microbatch: int, output: Any) -> Tensor | None:
        """Return the loss of a microbatch; None if its weight is zero."""
        is_first = not losses.values
        watches = not losses.is_single and not self.weigher.is_set and (is_first or bool(losses.calls))
        if not watches:
            loss = self._call_loss(losses, microbatch, output)
            if is_first and self.weigher.is_checked:
                self._look(losses, microbatch, output)
        elif self._original is None:
            target = losses.targets[microbatch]
            before = _versions(target)
            with LossCalls() as calls:
                loss = self._call_loss(losses, microbatch, output)
            if before == _versions(target):
                manner = calls.alone(output, target, loss)
                if not is_first or losses.weights is None or not is_same(manner, self._manner):
                    self._learn(losses, microbatch, output, target, calls.recorded, loss)
                    self._manner = manner if self._rule is not None else None
            else:
                self._learn_of_marked(losses, microbatch, output, calls.recorded, loss)
        else:
            if losses.weights is None:
                self._learn_from_original(self._original, losses, microbatch, output)
            loss = self._call_loss(losses, microbatch, output)
        if losses.looks:
            self._keep(losses, microbatch, output)
        losses.values[microbatch] = self._value(losses, microbatch) if losses.summands else loss.detach()
        assert losses.weights is not None
        return loss if losses.weights.terms[microbatch] else None

    def _call_loss(self, losses: Losses, microbatch: int, output: Any) -> Tensor:
        assert self.loss is not None
        target = losses.targets[microbatch]
        loss = self.loss(output) if target is None else self.loss(output, target)
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, losses.metrics[microbatch] = loss[0], pytree.tree_map_only(Tensor, Tensor.detach, loss[1])
        if isinstance(loss, Mapping) or losses.summands:
            return self._of_summands(losses, microbatch, loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"pipeline: the loss is {kind}, expected a tensor with one element, or that and a dict of metrics"
            )
        return loss

    def _of_summands(self, losses: Losses, microbatch: int, loss: Any) -> Tensor:
        """Return the weighted sum of a microbatch's summands."""
        if not isinstance(loss, Mapping) or set(loss) != set(losses.summands):
            kind = f"a dict of {', '.join(map(str, loss))}" if isinstance(loss, Mapping) else type(loss).__name__
            expected = f"a dict of {', '.join(losses.summands)}" if losses.summands else "nothing of summands"
            raise UsageError(
                f"pipeline: the loss is {kind}, but weigh= says {expected}: pass a dict of their terms, such as "
                'weigh={"words": lambda target: (target != -100).sum(), "penalty": "rows"}'
            )
        parts: list[Tensor] = []
        for name, value in loss.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise UsageError(f"pipeline: summand {name} of the loss is not a tensor with one element")
            losses.of_summands.setdefault(name, {})[microbatch] = value.detach()
            if share := losses.summands[name].in_updates(losses.every)[microbatch]:  # otherwise it may be 0/0
                parts.append(value.reshape(()) * share)
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def _value(self, losses: Losses, microbatch: int) -> Tensor:
        """Return the contribution of a microbatch's summands to the loss of the batch."""
        shares = {name: weights.in_batch()[microbatch] for name, weights in losses.summands.items()}
        parts = [values[microbatch].reshape(()) * shares[n] for n, values in losses.of_summands.items() if shares[n]]
        return torch.stack(parts).sum() if parts else torch.zeros(())

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
            losses.in_model[microbatch] = [
                call.count if call.reduction not in ("sum", "none") else None for call in calls.recorded
            ]
            if not losses.values:
                losses.sums = [call.result for call in calls.recorded if call.reduction == "sum"]
        return results

    # Weights of losses

    def _learn(
        self, losses: Losses, microbatch: int, output: Any, target: Any, calls: list[LossCall], loss: Tensor
    ) -> None:
        """Learn the weights from the calls of torch's losses in a microbatch's loss."""
        counts = [call.count if call.reduction not in ("sum", "none") else None for call in calls]
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
            losses.weights, self._rule = weights_of(losses.rows, losses.rows, is_sum=is_sum), None
            if losses.sums and not is_sum:
                self._warn_of_sums()
        elif len(rules) > 1 and (weights := self._weights_of_several(losses, microbatch, output, rules, counts)):
            losses.weights, self._rule = weights, None
        elif losses.weights is None or not rule.equals(self._rule):
            losses.weights, self._rule = self._apply_rule(losses, rule), rule
        if not is_certain:
            if calls and self._may_count:
                losses.calls[microbatch] = counts
            self._look(losses, microbatch, output)

    def _weights_of_several(
        self, losses: Losses, microbatch: int, output: Any, rules: Sequence[CountRule], counts: Sequence[Count | None]
    ) -> MicrobatchWeights | None:
        """Return weights when the first microbatch cannot show which of several tensors of the target holds the terms.

        For example weights and a mask that are all ones there. None if it makes no difference, or stays undecided.
        """
        candidates = [self._apply_rule(losses, rule).in_batch() for rule in rules]
        if len(counts) != 1 or counts[0] is None or all(map(partial(_are_close, candidates[0]), candidates[1:])):
            return None
        try:
            return self._weights_of_copies(losses, microbatch, output, counts[0])
        except UsageError:  # all calls are compared with the first one's
            return None

    def _learn_of_marked(
        self, losses: Losses, microbatch: int, output: Any, calls: list[LossCall], loss: Tensor
    ) -> None:
        """Learn the weights of a loss that changes its target in place, such as `y[y == pad] = -100`.

        The targets of later microbatches are not changed yet, so terms cannot be counted in them: the loss is called
        once on a copy of each, with the first microbatch's output, and all calls are compared with this result.
        """
        counts = [call.count if call.reduction not in ("sum", "none") else None for call in calls]
        if losses.calls:  # uncertain in the first microbatch
            losses.calls[microbatch] = counts
            return
        losses.weights, self._rule = weights_of(losses.rows, losses.rows), None
        is_whole = len(calls) == 1 and calls[0].result is loss
        if is_whole and calls[0].reduction == "sum":
            losses.weights = weights_of(losses.rows, losses.rows, is_sum=True)
        elif is_whole and counts[0] is not None:
            losses.weights = self._weights_of_copies(losses, microbatch, output, counts[0])
        if calls and self._may_count:
            losses.calls[microbatch] = counts
        self._look(losses, microbatch, output)

    def _weights_of_copies(self, losses: Losses, microbatch: int, output: Any, count: Count) -> MicrobatchWeights:
        """Return the weights of losses, each called on a copy of its target. Raises UsageError if undecided."""
        losses_of_copies = {microbatch: count}
        for number, rows in enumerate(losses.rows):
            if rows and number not in losses_of_copies:
                losses_of_copies[number] = self._count_of_marked(losses, number, output, losses.rows[microbatch])
        values = dict(zip(losses_of_copies, as_numbers(list(losses_of_copies.values())), strict=True))
        return weights_of([values.get(n, 0.0) for n in range(len(losses.rows))], losses.rows)

    def _count_of_marked(self, losses: Losses, number: int, output: Any, rows_of_output: int) -> Count:
        """Return the number of terms of a microbatch's loss in advance. Raises UsageError if it is undecided."""
        rows = losses.rows[number]
        try:
            if rows > rows_of_output:
                raise UsageError("it has more rows than the first microbatch")
            given = _copy_values(
                output if rows == rows_of_output else take_rows(output, slice(0, rows), self.rows.output)
            )
            with LossCalls() as calls:
                self._call_on_copy(given, losses.targets[number])
            call: LossCall
            (call,) = calls.recorded
            if call.count is None:
                raise UsageError("its terms are not known")
            return call.count
        except Exception as error:
            raise UsageError(
                f"pipeline: the loss changes its target in place, and the number of terms of microbatch {number} "
                f"cannot be determined in advance ({error}): change targets before you pass them to step, or {REMEDY}"
            ) from error

    def _call_on_copy(self, output: Any, target: Any) -> Any:
        loss: Any = isolate(self.loss, _parameters_of(self.loss))  # type: ignore[arg-type]
        with torch.no_grad(), _same_random_numbers(output):
            return loss(output) if target is None else loss(output, _copy_values(target))

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

    def _learn_from_original(self, original: Loss, losses: Losses, microbatch: int, output: Any) -> None:
        """Learn the weights from the original of a compiled loss."""
        losses.weights = weights_of(losses.rows, losses.rows)
        given, target = _copy_values(output), _copy_values(losses.targets[microbatch])
        before = _versions(target)
        try:
            original = isolate(original, _parameters_of(original))
            with LossCalls() as calls, torch.no_grad(), _same_random_numbers(given):
                value = original(given) if target is None else original(given, target)
        except Exception:  # it is unknown then
            return
        value = value[0] if isinstance(value, tuple) else value
        if before == _versions(target):
            self._learn(losses, microbatch, given, target, calls.recorded, value)
        else:
            self._learn_of_marked(losses, microbatch, given, calls.recorded, value)
        losses.calls.clear()

    def _apply_rule(self, losses: Losses, rule: CountRule) -> MicrobatchWeights:
        counts = iter(rule.counts([target for target, count in zip(losses.targets, losses.rows, strict=True) if count]))
        return weights_of([next(counts) if count else 0.0 for count in losses.rows], losses.rows, is_sum=rule.is_sum)

    # Whether microbatch losses add up

    def _look(self, losses: Losses, microbatch: int, output: Any) -> None:
        """Decide at the first microbatch of a batch whether the batch is compared."""
        if self._may_look and not losses.is_single:
            is_even = losses.weights is None or _are_by_rows(losses)
            losses.looks = self._looks.is_due(
                (_structure_key(output), _structure_key(losses.targets[microbatch]), is_even)
            )

    def _keep(self, losses: Losses, microbatch: int, output: Any) -> None:
        outputs = losses.outputs
        if len(outputs) < 2 or (len(outputs) + 1) * _bytes(output) <= KEPT:
            # A sent output is in memory that the next microbatch may overwrite, and a loss may work in place.
            outputs[microbatch] = _copy_values(output)

    def fault(self, losses: Losses) -> str:
        """Return the error in the losses of a finished batch; "" if there is none, or it cannot be determined."""
        fault = self._fault(losses)
        return f"{fault}. {OF_SUMMANDS}" if fault and not losses.summands else fault

    def _fault(self, losses: Losses) -> str:
        by = "what weigh= says" if self.weigher.is_set else "the terms of its target" if self._rule else "their rows"
        fault, is_compared = self._fault_together(losses, by) if losses.looks else ("", False)
        if fault:
            return fault
        in_calls = self._fault_in_calls(losses, by)
        if in_calls and is_compared and len(losses.outputs) == len(losses.values):
            self._may_count = False  # the whole batch shows that these calls do not matter
            return ""
        return in_calls

    def _fault_in_calls(self, losses: Losses, by: str) -> str:
        return self._fault_in(losses.calls, losses, by) or self._fault_in(losses.in_model, losses, by)

    def _fault_in(self, calls: Mapping[int, list[Count | None]], losses: Losses, by: str) -> str:
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
            rows, own_targets = [losses.rows[number] for number in numbers], [losses.targets[n] for n in numbers]
            outputs = join_microbatches([losses.outputs[number] for number in numbers], rows, self.rows.output)
            targets = (
                join_microbatches(own_targets, rows, self.rows.y, what="y") if own_targets[0] is not None else None
            )
            first = losses.outputs[numbers[0]], losses.targets[numbers[0]]
            again, whole = self._losses_of_copies(first, (outputs, targets))
        except Exception:  # a loss that fails for several microbatches cannot be compared
            kinds = {tuple(map(_trailing, pytree.tree_leaves(losses.outputs[number]))) for number in numbers}
            if len(kinds) < 2 or self.weigher.is_set or self._rule is not None or losses.weights.is_sum:
                return "", False
            return (
                f"pipeline: microbatches have outputs of different lengths, and were weighted by {by}: {REMEDY}"
            ), True
        summands = {name: (losses.of_summands[name], one) for name, one in losses.summands.items()}
        for name, (values, weights) in (summands or {"": (losses.values, losses.weights)}).items():
            own = [float(values[number]) for number in numbers]
            if math.isfinite(own[0]) and not is_close(again[name], own[0], abs(own[0]), epsilon):
                self._may_look = False  # it is random, or differs between calls
                return "", False
            weights = MicrobatchWeights(tuple(weights.terms[number] for number in numbers), weights.is_sum)
            of = f"{by} of {name}" if name else by
            if fault := fault_in_sum(whole[name], own, weights, epsilon, by=of):
                return fault, True
        return "", True

    def _losses_of_copies(self, *batches: tuple[Any, Any]) -> list[dict[str, float]]:
        """Return the loss of each batch without side effects: on a copy, with restored random states."""
        loss: Any = isolate(self.loss, _parameters_of(self.loss))  # type: ignore[arg-type]
        results = []
        with torch.no_grad(), _same_random_numbers(batches[0]):
            for output, target in batches:
                results.append(
                    _numbers(loss(_copy_values(output)) if target is None else loss(_copy_values(output), target))
                )
        return results


def _same_random_numbers(values: Any) -> Any:
    """Return a context that restores the random states at its end."""
    devices = {leaf.device for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda}
    return torch.random.fork_rng(devices=list(devices))


def _copy_values(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _are_by_rows(losses: Losses) -> bool:
    """Return whether all weights in a batch equal those by rows: only other batches then reveal different terms."""
    by_rows = shares(losses.rows)
    every = [losses.weights] if not losses.summands else losses.summands.values()
    return all(one is None or one.is_sum or _are_close(one.in_batch(), by_rows) for one in every)


def _are_close(shares: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(one - other) < 1e-9 for one, other in zip(shares, others, strict=True))


def total_of(loss: Any) -> Any:
    """Return the loss in a function's result: without metrics, or the sum of summands."""
    loss = loss[0] if isinstance(loss, tuple) else loss
    return sum(loss.values()) if isinstance(loss, Mapping) else loss


def _numbers(loss: Any) -> dict[str, float]:
    """Return the summands in a function's result, or the single loss."""
    loss = loss[0] if isinstance(loss, tuple) else loss
    return {name: float(one) for name, one in (loss.items() if isinstance(loss, Mapping) else [("", loss)])}


def _versions(value: Any) -> list[int]:
    """Return the autograd versions of the tensors of a value."""
    if isinstance(value, Tensor):
        return [] if value.is_inference() else [value._version]
    return [one._version for one in pytree.tree_leaves(value) if isinstance(one, Tensor) and not one.is_inference()]


def _is_of(one: Tensor, output: Any) -> bool:
    """Return whether a tensor is an output or a view of all of it."""
    return any(is_view(one, leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def _parameters_of(loss: Any) -> dict[int, Any]:
    """Return the objects that copies of a loss share with it: parameters, which a forward does not change."""
    referenced = [loss, *(cell.cell_contents for cell in getattr(loss, "__closure__", None) or () if _is_filled(cell))]
    modules = [value for value in referenced if isinstance(value, nn.Module)]
    return {id(parameter): parameter for module in modules for parameter in module.parameters()}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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
