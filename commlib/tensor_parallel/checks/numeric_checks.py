"""Numeric checks: compare one rank's sharded run with the unsharded model, where rules cannot decide."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.compare import TOLERANCES, ComparedPair, find_differences
from commlib.tensor_parallel.checks.guided_run import GuidedRun, expected_input, is_guided, sharding_of
from commlib.tensor_parallel.checks.trace_run import FROM_OUTSIDE, TracedRun
from commlib.tensor_parallel.placements import CALLER, COMPUTED, Placement
from commlib.tensor_parallel.rules import CheckedPlan, Doubt, PlanError, check, compare
from commlib.tensor_parallel.styles import Column, Style
from commlib.tensor_parallel.trace import ModelTrace, TraceStep

_SLACK, _MOST = 20, 0.1
"""Factor on the tolerances of `verify`, for plans checked without `verify`, and the upper bound of the product."""


OTHER_VALUES = "ranks call it with different values"
PARTS = "its inputs are sharded already"


class ModelRunner(Protocol):
    """A model that can be run forward, recording every value."""

    def forward(
        self, call: Any, styles: Mapping[str, Style], guide: GuidedRun | None, *, evaluate: bool
    ) -> TracedRun | None:
        """Run it without gradients, and restore all state; None if the call has no numbers, or the model cannot run so.

        guide: run it as one rank, with the guide's inputs; without a guide unsharded, even if it is sharded now.
        evaluate: in evaluation mode. An error of the model is the run's error.
        """

    def whole_and_part(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the unsharded call and this rank's call, in which some tensors are shards, by their indices.

        dims: dimension of each of these tensors. is_part: whether they are shards in the call; else they are split.
        Tensors without numbers get some. None if the call has them in objects that cannot be rebuilt. Collective.
        """


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The first value that differs: its step, its expected placement, and the difference as text.

    suspects: doubts of the rules about earlier steps. proves: the plan is wrong, although no numbers differ.
    """

    step: TraceStep
    state: Placement
    text: str
    suspects: tuple[Doubt, ...] = ()
    proves: bool = False

    def __str__(self) -> str:
        return f"{self.step.at}: {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the numeric check: the reason if it could not decide ("" if it did), and the difference, if any.

    failed: where a sharded run failed or broke a rule, so there is nothing to compare. settled: doubts of the rules
    that the comparison has settled. more: doubts about gradients. trusts_backward: there are functions with a backward
    of their own, whose gradients could not be compared.
    """

    undecided: str = ""
    difference: ValueDifference | None = None
    failed: ValueDifference | None = None
    settled: frozenset[str] = frozenset()
    trusts_backward: bool = False
    more: tuple[Doubt, ...] = ()

    def open_doubts(self, doubts: Sequence[Doubt]) -> list[Doubt]:
        """Return the open doubts: about operations that did not run in the comparison, or all if none was made."""
        if self.undecided:
            return list(doubts)
        kinds = ("unknown", "unseen", "number")
        relevant = (one for one in doubts if (one.stays or one.step.kind in kinds) and f"{one}" not in self.settled)
        return [*relevant, *self.more]


def compare_numbers(
    model: ModelRunner,
    axis: ParallelAxis,
    styles: Mapping[str, Style],
    call: Any,
    *,
    divided: bool,
    divided_output: bool = False,
    sharded_dims: Mapping[int, int] | None = None,
) -> Verdict:
    """Run a model unsharded, and as one rank with its shard, forward only; return the first difference.

    divided: whether it is sharded already. sharded_dims: tensors that a sharded model takes as its part of a sequence,
    by index, with the dimension. All state is restored. Collective over the axis; all ranks return equal results.
    """
    if axis.size == 1 or "" in styles:  # one layer, which is correct by definition
        return Verdict()
    with axis.exact():
        both = model.whole_and_part(call, sharded_dims, is_part=divided) if sharded_dims else (call, call)
        if not all(axis.comm.all_gather_object(both is not None)) or both is None:
            return Verdict(PARTS)
        return _compare_values(model, axis, styles, *both, divided, divided_output)


def _compare_values(
    model: ModelRunner,
    axis: ParallelAxis,
    styles: Mapping[str, Style],
    call: Any,
    part: Any,
    divided: bool,
    divided_output: bool,
) -> Verdict:
    evaluate = False
    whole = model.forward(call, styles, None, evaluate=evaluate)
    reason, draws = _agree(axis, _why_not_reference(axis, whole, styles), whole is not None and whole.draws)
    if divided and not reason:
        reason = _compare_inputs(axis, whole)
    if draws and not reason:
        evaluate = True
        whole = model.forward(call, styles, None, evaluate=evaluate)
        reason, draws = _agree(axis, _why_not_reference(axis, whole, styles), whole is not None and whole.draws)
    if reason or whole is None:
        return Verdict(reason)
    checked = check(whole.trace, styles, divided_output=True, size=axis.size)
    own = model.forward(part, styles, GuidedRun(axis, whole, styles, checked, cuts=not divided), evaluate=evaluate)
    assert own is not None
    reason, _ = _agree(axis, "it communicates outside of layers" if own.communicates else "", False)
    if reason:
        return Verdict(reason)
    failed = next(
        (one for one in axis.comm.all_gather_object(_find_failure(axis, whole, own, styles, checked)) if one), None
    )
    if failed is not None:
        return Verdict(failed.text, failed=failed)
    verdict = _RunComparison(axis, whole, own, styles, checked, divided_output).verdict()
    if verdict.difference is None:
        own_alike = _alike(whole.results, own.results) and _are_read_numbers_near(whole, own, checked)
        same = all(axis.comm.all_gather_object(own_alike))  # numbers count, and values made of them
        unsettled = set() if same else {"number"}
        if verdict.trusts_backward:
            unsettled.add("unknown")
        settled = (one for one in checked.doubts if not one.stays and one.step.kind not in unsettled)
        more = tuple(one for one in checked.doubts if one.step.kind == "gradient")
        return replace(verdict, settled=frozenset(map(str, settled)), more=more)
    if draws:
        return Verdict("it draws random numbers in evaluation mode, too")
    return Verdict(
        difference=replace(verdict.difference, suspects=_doubts_before(verdict.difference.step, whole.trace, checked))
    )


def _alike(whole: Sequence[float], own: Sequence[float]) -> bool:
    return len(whole) == len(own) and np.allclose(own, whole, _SLACK * TOLERANCES["float32"], equal_nan=True)


def _are_read_numbers_near(whole: TracedRun, own: TracedRun, checked: CheckedPlan) -> bool:
    """Return whether numbers that were read from tensors equal the unsharded run's, where rules cannot decide.

    The model may keep such numbers, so values derived from them may not occur in this call.
    """
    doubted = {id(one.step) for one in checked.doubts}
    every, ours = ([step for step in run.trace.steps if step.kind == "number"] for run in (whole, own))
    if len(every) != len(ours):
        return False
    doubted_pairs = [(one, other) for one, other in zip(every, ours, strict=True) if id(one) in doubted and one.dim < 0]
    pairs = [
        (whole.values[value], own.values[part])
        for step, local in doubted_pairs
        for value, part in zip(step.inputs, local.inputs, strict=False)
    ]
    return all(one.shape == part.shape and _is_near(one, part) for one, part in pairs)


def _is_near(whole: Array, own: Array) -> bool:
    tolerance = min(_MOST, _SLACK * TOLERANCES.get(whole.dtype.name, 0.0))
    theirs, ours = (one.astype(np.complex128) for one in (whole, own))
    return np.allclose(ours, theirs, 0.0, tolerance * float(np.abs(theirs).max(initial=0.0)), equal_nan=True)


def _doubts_before(step: TraceStep, trace: ModelTrace, checked: CheckedPlan) -> tuple[Doubt, ...]:
    """Return the doubts of the rules about the steps up to one."""
    places = {id(one): at for at, one in enumerate(trace.steps)}
    return tuple(doubt for doubt in checked.doubts if places[id(doubt.step)] <= places.get(id(step), len(places)))


def _why_not_reference(axis: ParallelAxis, whole: TracedRun | None, styles: Mapping[str, Style]) -> str:
    """Return why a run cannot serve as the unsharded reference; "" if it can."""
    if whole is None:
        return "its inputs have no numbers, or it cannot be run unsharded"
    if whole.error is not None:
        return f"it fails in an unsharded run: {whole.error}"
    try:
        checked = check(whole.trace, styles, divided_output=True, size=axis.size)
    except PlanError as error:
        return f"it breaks a rule in an unsharded run: {error}"
    if whole.communicates:
        return "it communicates outside of layers"
    if whole.hides:
        return "its layers run in functions that cannot be traced"
    return PARTS if checked.inputs_sharded and not checked.sharded_dims else ""


def _compare_inputs(axis: ParallelAxis, whole: TracedRun | None) -> str:
    """Return "" if ranks call the model with the same values; otherwise there is no common reference. Collective."""
    steps = () if whole is None else whole.trace.steps
    inputs = [whole.values[value] for step in steps if whole and step.kind == "given" for value in step.outputs]
    digests = [f"{one.dtype}{one.shape} {zlib.crc32(np.ascontiguousarray(one).tobytes())}" for one in inputs]
    everyone = axis.comm.all_gather_object(digests)
    if all(one == everyone[0] for one in everyone):
        return ""
    places = [at for at, texts in enumerate(zip(*everyone, strict=False)) if len(set(texts)) > 1]
    return f"{OTHER_VALUES}: " + ", ".join(f"tensor {at} of {everyone[0][at].split()[0]}" for at in places)


def _find_failure(
    axis: ParallelAxis, whole: TracedRun, own: TracedRun, styles: Mapping[str, Style], checked: CheckedPlan
) -> ValueDifference | None:
    """Return the step at which a rank's run failed, or where its shapes break a rule."""
    try:
        if own.error is None:
            compare(whole.trace, own.trace, checked)
            return None
        states = check(own.trace, styles, divided_output=True, size=axis.size).states
    except PlanError as error:
        return ValueDifference(error.step, error.state, f"{error}", proves=own.error is None)
    if not own.trace.steps:
        return ValueDifference(TraceStep("", "unknown", (), (), "its beginning"), COMPUTED, f"{own.error}")
    step = own.trace.steps[-1]
    state = next((states[value] for value in step.inputs if states[value].is_divided), COMPUTED)
    return ValueDifference(step, state, f"with this rank's shard it fails, at {step.at}: {own.error}")


def _agree(axis: ParallelAxis, own: str, flag: bool) -> tuple[str, bool]:
    """Return the first non-empty text of the ranks, and whether any rank has the flag. Collective."""
    everyone = axis.comm.all_gather_object((own, flag))
    return next((text for text, _ in everyone if text), ""), any(raised for _, raised in everyone)


class _RunComparison:
    """The values of an unsharded and a sharded run, in matching pairs."""

    def __init__(
        self,
        axis: ParallelAxis,
        whole: TracedRun,
        own: TracedRun,
        styles: Mapping[str, Style],
        checked: CheckedPlan,
        divided_output: bool,
    ) -> None:
        self._axis, self._whole, self._own, self._styles = axis, whole, own, styles
        self._states, self._divided_output = checked.states, divided_output
        self._sequences_sharded = checked.sequences_sharded

    def verdict(self) -> Verdict:
        """Return the first value that differs, if a layer's or the model's value does on any rank. Collective.

        Differences of single operations that reach neither are ignored.
        """
        every, layers = (self._steps(trace) for trace in (self._whole.trace, self._own.trace))
        alike = [self._names(steps) for steps in (every, layers)]
        same = alike[0] == alike[1]
        answers = self._axis.comm.all_gather_object((same, alike[0]))
        if not all(one and names == answers[0][1] for one, names in answers):
            every, layers = ([step for step in steps if step.layer] for steps in (every, layers))
            alike = [self._names(steps) for steps in (every, layers)]
            answers = self._axis.comm.all_gather_object((alike[0] == alike[1], alike[0]))
            if not all(one and names == answers[0][1] for one, names in answers):
                return Verdict(difference=self._first_other_step(every, layers))
        has_gradients = self._whole.arriving is not None and self._own.arriving is not None
        compared, custom = all(self._axis.comm.all_gather_object(has_gradients)), self._whole.is_custom
        gradients = self._gradients(every, layers) if compared else ()
        verdict = self._find_difference([*self._pairs(every, layers), *gradients])
        return replace(verdict, trusts_backward=custom and not compared)

    def _steps(self, trace: ModelTrace) -> list[TraceStep]:
        return [step for step in trace.steps if step.kind not in FROM_OUTSIDE]

    def _names(self, steps: list[TraceStep]) -> list[tuple[int, str, int]]:
        """Return descriptions of steps; layers are numbered by first call: names may differ between ranks."""
        places = {"": 0}
        return [(places.setdefault(step.layer, len(places)), step.kind, len(step.outputs)) for step in steps]

    def _first_other_step(self, whole: list[TraceStep], own: list[TraceStep]) -> ValueDifference:
        names = self._names(whole), self._names(own)
        at = next(
            (at for at, (one, other) in enumerate(zip(*names, strict=False)) if one != other), min(map(len, names))
        )
        step = whole[min(at, len(whole) - 1)] if whole else TraceStep("", "unknown", (), ())
        text = "the unsharded model calls it here, but a rank with its shard calls another layer, or none"
        answers: list[tuple[int, ValueDifference]] = self._axis.comm.all_gather_object(
            (at, ValueDifference(step, COMPUTED, text))
        )
        return min(answers, key=lambda one: one[0])[1]

    def _pairs(
        self, whole: list[TraceStep], own: list[TraceStep]
    ) -> Iterator[tuple[ComparedPair, TraceStep, Placement, bool]]:
        """Yield (pair, step, placement of the value, whether it decides) in order."""
        for step, local in zip(whole, own, strict=True):
            values = list(zip(step.outputs, local.outputs, strict=True))
            if is_guided(step):
                for value, part in zip(step.inputs, local.inputs, strict=False):
                    state = expected_input(step, self._styles.get(step.layer), len(self._whole.trace.shapes[value]))
                    if state.is_divided or self._states[value] == COMPUTED:
                        yield (
                            self._pair(f"the input of {step.where}", value, part, state),
                            step,
                            self._of(value, state),
                            True,
                        )
                values = values[:1]
            for value, part in values:
                state = self._states[value]
                if self._can_pair(state) and not state.inner:
                    decides = bool(step.layer) or step.kind == "gradient"
                    yield self._pair("its result", value, part, state), step, state, decides
        for what, value, part in self._ends():
            state = self._states[value]
            if state.name == "unknown" and not self._divided_output:
                state = self._part_or_whole(value, part)
            if self._can_pair(state):
                step = self._whole.trace.maker(value)
                yield self._pair(what, value, part, state), step, state, True

    def _part_or_whole(self, value: int, part: int) -> Placement:
        """Return the expected placement of a value of unknown placement: replicated, or sharded along a dimension if
        it is the only one whose length differs, and shards of sequences are among the inputs.
        """
        shapes = self._whole.trace.shapes[value], self._own.trace.shapes[part]
        other = [dim for dim, (length, own) in enumerate(zip(*shapes, strict=False)) if length != own]
        is_part = self._sequences_sharded and len(other) == 1 and len(shapes[0]) == len(shapes[1])
        return Placement("sequence", other[0], CALLER) if is_part else COMPUTED

    def _ends(self) -> Iterator[tuple[str, int, int]]:
        """Yield (description, value, its part) for values that are used with a gradient after the model's call."""
        whole, own = self._whole.trace, self._own.trace
        for at, (value, part) in enumerate(zip(whole.outputs, own.outputs, strict=False)):
            yield f"the model's result {at}", value, part
        for value, part in (
            zip(whole.retained, own.retained, strict=False) if len(whole.retained) == len(own.retained) else ()
        ):
            if value not in whole.detached:
                yield "a value kept after the model's call", value, part

    def _gradients(
        self, whole: list[TraceStep], own: list[TraceStep]
    ) -> Iterator[tuple[ComparedPair, TraceStep, Placement, bool]]:
        """Yield pairs of the gradients of layers' results, like `_pairs`, with the step that produces them."""
        theirs, ours = self._whole.arriving or {}, self._own.arriving or {}
        largest = max((float(np.abs(each).max(initial=0)) for each in theirs.values()), default=0.0)
        for step, local in zip(whole, own, strict=True):
            for value, part in zip(step.outputs, local.outputs, strict=True):
                state = self._states[value]
                is_shard = state.is_divided and not state.inner and state.copies(self._axis.size) == 1
                if value in theirs and part in ours and (is_shard or state == COMPUTED) and self._can_pair(state):
                    what = f"the gradient that it returns for {step.where}"
                    pair = self._make_pair(what, ours[part], theirs[value], state)
                    yield replace(pair, floor=largest / 1000), self._function_after(value) or step, state, True

    def _function_after(self, value: int) -> TraceStep | None:
        """Return the first operation after a value that has no rule, before another layer."""
        trace, waiting, seen = self._whole.trace, [value], {value}
        while waiting:
            for at in trace.users.get(waiting.pop(0), ()):
                step = trace.steps[at]
                if step.kind == "unknown":
                    return step
                if not step.layer:
                    waiting += [one for one in step.outputs if one not in seen]
                    seen.update(step.outputs)
        return None

    def _can_pair(self, state: Placement) -> bool:
        return state.name not in ("unknown", "partial") and (state.parts == 1 or self._is_fused(state))

    def _of(self, value: int, state: Placement) -> Placement:
        known = self._states[value]
        return known if known.by else state

    def _is_fused(self, state: Placement) -> bool:
        style = self._styles.get(state.by)
        parts = style.parts if isinstance(style, Column) else 0
        return state.parts == (parts if isinstance(parts, int) else len(parts))

    def _pair(self, what: str, value: int, part: int, state: Placement) -> ComparedPair:
        return self._make_pair(what, self._own.values[part], self._whole.values[value], state)

    def _make_pair(self, what: str, own: Array, whole: Array, state: Placement) -> ComparedPair:
        if not state.is_divided:
            return ComparedPair(what, own, whole)
        if state.copies(self._axis.size) > 1:
            heads = Sharding(whole.shape, state.dim, (), state.units, shared=True)
            if own.shape != heads.local(self._axis.rank, self._axis.size):  # each rank repeats them for its own heads
                return ComparedPair(what, own, own)
            return ComparedPair(what, own, whole, shard=Shard(self._axis, heads))
        if state.parts == 1:
            return ComparedPair(what, own, whole, dim=state.dim)
        sharding = sharding_of(whole.shape, state, self._styles.get(state.by))
        return ComparedPair(what, own, whole, shard=Shard(self._axis, sharding))

    def _find_difference(self, compared: list[tuple[ComparedPair, TraceStep, Placement, bool]]) -> Verdict:
        pairs = [one[0] for one in compared]
        coarsest = max((TOLERANCES.get(pair.own.dtype.name, 0.0) for pair in pairs), default=0.0)
        tolerance = min(_MOST, _SLACK * coarsest)
        texts = find_differences(self._axis, pairs, tolerance)
        deciding = [at for at in texts if compared[at][3]]
        floats = [at for at in deciding if pairs[at].own.dtype.name in TOLERANCES]
        answers = self._axis.comm.all_gather_object((min(floats, default=None), bool(deciding)))
        decides = min((at for at, _ in answers if at is not None), default=None)
        if decides is None:  # rounding may change indices, such as the index of a maximum
            return Verdict("integers differ, and no floats" if any(differs for _, differs in answers) else "")
        own = min((at for at in texts if at <= decides), default=None)
        everyone = self._axis.comm.all_gather_object(None if own is None else (own, texts[own]))
        at, text = min(one for one in everyone if one is not None)
        ranks = [rank for rank, one in enumerate(everyone) if one is not None and one[0] == at]
        pair, step, state, _ = compared[at]
        where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self._axis.size}"
        message = f"{pair.what} differs from the unsharded model's on {where}: {text}"
        return Verdict(difference=ValueDifference(step, state, message))


def make_plan_error(difference: ValueDifference) -> UsageError:
    """Return the error for a plan with different numbers."""
    suspects = difference.suspects
    names = [state.source or state.by for state in (difference.state, *(one.state for one in suspects)) if state.by]
    by = names[0] if names else "the layers before"
    if suspects:
        at = " and of ".join(dict.fromkeys(one.step.at for one in suspects[-3:]))
        doubt = f"; the rules do not know whether {at} can take shards"
    else:
        doubt = ""
    shapes = any(one.step.kind == "shape" for one in suspects)
    return UsageError(
        f"plan: {difference}{doubt}. Gather the shards of {by} before (gather=True, or a Row), or leave it unsharded"
        f"{', or read units or out_features of the layer, not the shape of its weight' * shapes}"
    )
