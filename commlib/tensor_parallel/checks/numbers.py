"""Numbers: hold what a rank computes with its part of a model against the whole, where rules cannot tell."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.differences import TOLERANCES, Pair, differs
from commlib.tensor_parallel.checks.guide import Guide, is_guided, sharding_of, taken
from commlib.tensor_parallel.checks.runs import FROM_OUTSIDE, Run
from commlib.tensor_parallel.rules import Checked, Doubt, PlanError, check, compare
from commlib.tensor_parallel.states import CALLER, COMPUTED, State
from commlib.tensor_parallel.styles import Column, Style
from commlib.tensor_parallel.trace import Step, Trace

_SLACK, _MOST = 20, 0.1
"""By what the tolerances of `verify` are multiplied, for plans that nobody asked to verify, and up to what."""


OTHER_VALUES = "ranks call it with other values"
PARTS = "what it is called with is a part already"


class Runs(Protocol):
    """A model that can be run forward, value by value."""

    def forward(self, call: Any, styles: Mapping[str, Style], guide: Guide | None, *, evaluate: bool) -> Run | None:
        """Run it without gradients, and leave all as it was; None if the call has no numbers, or it cannot be run so.

        guide: run it as one rank, and so; without one as the whole that it is, or was before it was divided. evaluate:
        in evaluation mode. What it raises is the run's error.
        """

    def apart(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the call of the whole, and that of this rank, of which some tensors are parts, by their places.

        dims: along which. is_part: that is what they are in the call; else they are cut. What has no numbers gets some.
        None if the call has them in what cannot be made anew. Collective.
        """


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that differs: the step that gives or takes it, how it should lie, and by how much (in words).

    suspects: what the rules could not tell of the steps before. proves: the plan is wrong, though no numbers say so.
    """

    step: Step
    state: State
    said: str
    suspects: tuple[Doubt, ...] = ()
    proves: bool = False

    def __str__(self) -> str:
        return f"{self.step.at}: {self.said}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What numbers say of a plan: why they can tell nothing ("" if they can), and what differs, if anything does.

    failed: where a rank with its part failed, or what it computed broke a rule, so that there is nothing to compare.
    met: what the rules could not tell of the run that was compared. more: what they could not tell of its gradients.
    trusts_backward: there are functions with a backward of their own, whose gradients could not be compared.
    """

    untold: str = ""
    difference: Difference | None = None
    failed: Difference | None = None
    met: frozenset[str] = frozenset()
    trusts_backward: bool = False
    more: tuple[Doubt, ...] = ()

    def left(self, doubts: Sequence[Doubt]) -> list[Doubt]:
        """Return which doubts are left: those about operations that did not run when numbers were compared, or all."""
        if self.untold:
            return list(doubts)
        kinds = ("unknown", "unseen", "number")
        told = (one for one in doubts if (one.stays or one.step.kind in kinds) and f"{one}" not in self.met)
        return [*told, *self.more]


def judged(
    model: Runs,
    axis: Axis,
    styles: Mapping[str, Style],
    call: Any,
    *,
    divided: bool,
    divided_output: bool = False,
    came: Mapping[int, int] | None = None,
) -> Verdict:
    """Run a model as a whole, and as one rank with its part, forward alone; return where the two differ first.

    divided: it is divided already. came: tensors that a divided model takes for its part of a sequence, by their
    places, and along which dimension. All is as before. Collective over the axis; all ranks return alike.
    """
    if axis.size == 1 or "" in styles:  # one layer, which is what it is asked to be
        return Verdict()
    with axis.exact():
        both = model.apart(call, came, is_part=divided) if came else (call, call)
        if not all(axis.comm.all_gather_object(both is not None)) or both is None:
            return Verdict(PARTS)
        return _judged(model, axis, styles, *both, divided, divided_output)


def _judged(
    model: Runs, axis: Axis, styles: Mapping[str, Style], call: Any, part: Any, divided: bool, divided_output: bool
) -> Verdict:
    evaluate = False
    whole = model.forward(call, styles, None, evaluate=evaluate)
    untold, draws = _agreed(axis, _not_whole(axis, whole, styles), whole is not None and whole.draws)
    if divided and not untold:
        untold = _given_alike(axis, whole)
    if draws and not untold:
        evaluate = True
        whole = model.forward(call, styles, None, evaluate=evaluate)
        untold, draws = _agreed(axis, _not_whole(axis, whole, styles), whole is not None and whole.draws)
    if untold or whole is None:
        return Verdict(untold)
    checked = check(whole.trace, styles, divided_output=True, size=axis.size)
    own = model.forward(part, styles, Guide(axis, whole, styles, checked, cuts=not divided), evaluate=evaluate)
    assert own is not None
    untold, _ = _agreed(axis, "it communicates outside of layers" if own.communicates else "", False)
    if untold:
        return Verdict(untold)
    failed = next((one for one in axis.comm.all_gather_object(_failed(axis, whole, own, styles, checked)) if one), None)
    if failed is not None:
        return Verdict(failed.said, failed=failed)
    found = _Compared(axis, whole, own, styles, checked, divided_output).verdict()
    if found.difference is None:
        own_alike = _alike(whole.results, own.results) and _left_alike(whole, own, checked)
        same = all(axis.comm.all_gather_object(own_alike))  # what was made of numbers counts, and what may be
        unsettled = set() if same else {"number"}
        if found.trusts_backward:
            unsettled.add("unknown")
        settled = (one for one in checked.doubts if not one.stays and one.step.kind not in unsettled)
        more = tuple(one for one in checked.doubts if one.step.kind == "gradient")
        return replace(found, met=frozenset(map(str, settled)), more=more)
    if draws:
        return Verdict("it draws random numbers in evaluation mode, too")
    return Verdict(difference=replace(found.difference, suspects=_before(found.difference.step, whole.trace, checked)))


def _alike(whole: Sequence[float], own: Sequence[float]) -> bool:
    return len(whole) == len(own) and np.allclose(own, whole, _SLACK * TOLERANCES["float32"], equal_nan=True)


def _left_alike(whole: Run, own: Run, checked: Checked) -> bool:
    """Return whether numbers that left the tensors are those of the whole, where the rules cannot tell.

    They may be kept, and what is made of them then is seen in no value of this call.
    """
    doubted = {id(one.step) for one in checked.doubts}
    every, ours = ([step for step in run.trace.steps if step.kind == "number"] for run in (whole, own))
    if len(every) != len(ours):
        return False
    asked = [(one, other) for one, other in zip(every, ours, strict=True) if id(one) in doubted and one.dim < 0]
    pairs = [
        (whole.values[value], own.values[part])
        for step, local in asked
        for value, part in zip(step.inputs, local.inputs, strict=False)
    ]
    return all(one.shape == part.shape and _is_near(one, part) for one, part in pairs)


def _is_near(whole: Array, own: Array) -> bool:
    tolerance = min(_MOST, _SLACK * TOLERANCES.get(whole.dtype.name, 0.0))
    theirs, ours = (one.astype(np.complex128) for one in (whole, own))
    return np.allclose(ours, theirs, 0.0, tolerance * float(np.abs(theirs).max(initial=0.0)), equal_nan=True)


def _before(step: Step, trace: Trace, checked: Checked) -> tuple[Doubt, ...]:
    """Return what the rules could not tell of the steps up to one."""
    places = {id(one): at for at, one in enumerate(trace.steps)}
    return tuple(doubt for doubt in checked.doubts if places[id(doubt.step)] <= places.get(id(step), len(places)))


def _not_whole(axis: Axis, whole: Run | None, styles: Mapping[str, Style]) -> str:
    """Return why a run cannot stand for the whole model; "" if it can."""
    if whole is None:
        return "what it is called with has no numbers, or it cannot be run as a whole"
    if whole.error is not None:
        return f"run as a whole, it fails: {whole.error}"
    try:
        checked = check(whole.trace, styles, divided_output=True, size=axis.size)
    except PlanError as error:
        return f"run as a whole, it breaks a rule: {error}"
    if whole.communicates:
        return "it communicates outside of layers"
    if whole.hides:
        return "its layers run in functions that cannot be looked into"
    return PARTS if checked.came_in_parts and not checked.came else ""


def _given_alike(axis: Axis, whole: Run | None) -> str:
    """Return "" if ranks call the model with the same values: else there is no whole. Collective."""
    steps = () if whole is None else whole.trace.steps
    given = [whole.values[value] for step in steps if whole and step.kind == "given" for value in step.outputs]
    said = [f"{one.dtype}{one.shape} {zlib.crc32(np.ascontiguousarray(one).tobytes())}" for one in given]
    everyone = axis.comm.all_gather_object(said)
    if all(one == everyone[0] for one in everyone):
        return ""
    places = [at for at, texts in enumerate(zip(*everyone, strict=False)) if len(set(texts)) > 1]
    return f"{OTHER_VALUES}: " + ", ".join(f"tensor {at} of {everyone[0][at].split()[0]}" for at in places)


def _failed(axis: Axis, whole: Run, own: Run, styles: Mapping[str, Style], checked: Checked) -> Difference | None:
    """Return where a rank's run failed, or has shapes that break a rule."""
    try:
        if own.error is None:
            compare(whole.trace, own.trace, checked)
            return None
        states = check(own.trace, styles, divided_output=True, size=axis.size).states
    except PlanError as error:
        return Difference(error.step, error.state, f"{error}", proves=own.error is None)
    if not own.trace.steps:
        return Difference(Step("", "unknown", (), (), "its beginning"), COMPUTED, f"{own.error}")
    step = own.trace.steps[-1]
    state = next((states[value] for value in step.inputs if states[value].is_divided), COMPUTED)
    return Difference(step, state, f"with this rank's part it fails, at {step.at}: {own.error}")


def _agreed(axis: Axis, said: str, flag: bool) -> tuple[str, bool]:
    """Return what the first rank that says something says, and whether any has the flag. Collective."""
    everyone = axis.comm.all_gather_object((said, flag))
    return next((text for text, _ in everyone if text), ""), any(raised for _, raised in everyone)


class _Compared:
    """Two runs, and the pairs of values in them that belong together."""

    def __init__(
        self,
        axis: Axis,
        whole: Run,
        own: Run,
        styles: Mapping[str, Style],
        checked: Checked,
        divided_output: bool,
    ) -> None:
        self._axis, self._whole, self._own, self._styles = axis, whole, own, styles
        self._states, self._divided_output = checked.states, divided_output
        self._came = checked.sequences_came

    def verdict(self) -> Verdict:
        """Return the first value that differs, if a layer's or the model's does on any rank. Collective.

        What differs alone in an operation, and reaches neither, is of no account.
        """
        every, layers = (self._steps(trace) for trace in (self._whole.trace, self._own.trace))
        alike = [self._names(steps) for steps in (every, layers)]
        same = alike[0] == alike[1]
        told = self._axis.comm.all_gather_object((same, alike[0]))
        if not all(one and names == told[0][1] for one, names in told):
            every, layers = ([step for step in steps if step.layer] for steps in (every, layers))
            alike = [self._names(steps) for steps in (every, layers)]
            told = self._axis.comm.all_gather_object((alike[0] == alike[1], alike[0]))
            if not all(one and names == told[0][1] for one, names in told):
                return Verdict(difference=self._parted(every, layers))
        has_gradients = self._whole.arriving is not None and self._own.arriving is not None
        compared, custom = all(self._axis.comm.all_gather_object(has_gradients)), self._whole.is_custom
        gradients = self._gradients(every, layers) if compared else ()
        verdict = self._differing([*self._pairs(every, layers), *gradients])
        return replace(verdict, trusts_backward=custom and not compared)

    def _steps(self, trace: Trace) -> list[Step]:
        return [step for step in trace.steps if step.kind not in FROM_OUTSIDE]

    def _names(self, steps: list[Step]) -> list[tuple[int, str, int]]:
        """Return what steps are, layers by the order of their first calls: their names may differ between ranks."""
        places = {"": 0}
        return [(places.setdefault(step.layer, len(places)), step.kind, len(step.outputs)) for step in steps]

    def _parted(self, whole: list[Step], own: list[Step]) -> Difference:
        names = self._names(whole), self._names(own)
        at = next(
            (at for at, (one, other) in enumerate(zip(*names, strict=False)) if one != other), min(map(len, names))
        )
        step = whole[min(at, len(whole) - 1)] if whole else Step("", "unknown", (), ())
        said = "the undivided model calls it here, and a rank with its part another layer, or none"
        told: list[tuple[int, Difference]] = self._axis.comm.all_gather_object((at, Difference(step, COMPUTED, said)))
        return min(told, key=lambda one: one[0])[1]

    def _pairs(self, whole: list[Step], own: list[Step]) -> Iterator[tuple[Pair, Step, State, bool]]:
        """Yield (pair, step, state of the value, whether it decides) in order."""
        for step, local in zip(whole, own, strict=True):
            values = list(zip(step.outputs, local.outputs, strict=True))
            if is_guided(step):
                for value, part in zip(step.inputs, local.inputs, strict=False):
                    state = taken(step, self._styles.get(step.layer), len(self._whole.trace.shapes[value]))
                    if state.is_divided or self._states[value] == COMPUTED:
                        yield (
                            self._pair(f"what {step.where} takes", value, part, state),
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

    def _part_or_whole(self, value: int, part: int) -> State:
        """Return how what nothing is known of must lie: whole, or where parts of sequences came and its length is
        another one along a single dimension, divided along that.
        """
        shapes = self._whole.trace.shapes[value], self._own.trace.shapes[part]
        other = [dim for dim, (length, own) in enumerate(zip(*shapes, strict=False)) if length != own]
        is_part = self._came and len(other) == 1 and len(shapes[0]) == len(shapes[1])
        return State("sequence", other[0], CALLER) if is_part else COMPUTED

    def _ends(self) -> Iterator[tuple[str, int, int]]:
        """Yield (what it is, value, its part) of what goes on after the model's call with a gradient."""
        whole, own = self._whole.trace, self._own.trace
        for at, (value, part) in enumerate(zip(whole.outputs, own.outputs, strict=False)):
            yield f"the model's result {at}", value, part
        for value, part in zip(whole.kept, own.kept, strict=False) if len(whole.kept) == len(own.kept) else ():
            if value not in whole.detached:
                yield "what is kept of it after the model's call", value, part

    def _gradients(self, whole: list[Step], own: list[Step]) -> Iterator[tuple[Pair, Step, State, bool]]:
        """Yield pairs of the gradients that come to layers' results, as `_pairs` does, with what passes them on."""
        theirs, ours = self._whole.arriving or {}, self._own.arriving or {}
        largest = max((float(np.abs(each).max(initial=0)) for each in theirs.values()), default=0.0)
        for step, local in zip(whole, own, strict=True):
            for value, part in zip(step.outputs, local.outputs, strict=True):
                state = self._states[value]
                lies = state.is_divided and not state.inner and state.copies(self._axis.size) == 1
                if value in theirs and part in ours and (lies or state == COMPUTED) and self._can_pair(state):
                    what = f"the gradient that it returns for {step.where}"
                    pair = self._paired(what, ours[part], theirs[value], state)
                    yield replace(pair, floor=largest / 1000), self._function_after(value) or step, state, True

    def _function_after(self, value: int) -> Step | None:
        """Return the first operation after a value that the rules do not know, before another layer."""
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

    def _can_pair(self, state: State) -> bool:
        return state.name not in ("unknown", "partial") and (state.parts == 1 or self._is_fused(state))

    def _of(self, value: int, state: State) -> State:
        known = self._states[value]
        return known if known.by else state

    def _is_fused(self, state: State) -> bool:
        style = self._styles.get(state.by)
        parts = style.parts if isinstance(style, Column) else 0
        return state.parts == (parts if isinstance(parts, int) else len(parts))

    def _pair(self, what: str, value: int, part: int, state: State) -> Pair:
        return self._paired(what, self._own.values[part], self._whole.values[value], state)

    def _paired(self, what: str, own: Array, whole: Array, state: State) -> Pair:
        if not state.is_divided:
            return Pair(what, own, whole)
        if state.copies(self._axis.size) > 1:
            heads = Sharding(whole.shape, state.dim, (), state.units, shared=True)
            if own.shape != heads.local(self._axis.rank, self._axis.size):  # each rank repeats them for its own
                return Pair(what, own, own)
            return Pair(what, own, whole, shard=Shard(self._axis, heads))
        if state.parts == 1:
            return Pair(what, own, whole, dim=state.dim)
        sharding = sharding_of(whole.shape, state, self._styles.get(state.by))
        return Pair(what, own, whole, shard=Shard(self._axis, sharding))

    def _differing(self, found: list[tuple[Pair, Step, State, bool]]) -> Verdict:
        pairs = [one[0] for one in found]
        coarsest = max((TOLERANCES.get(pair.own.dtype.name, 0.0) for pair in pairs), default=0.0)
        tolerance = min(_MOST, _SLACK * coarsest)
        said = differs(self._axis, pairs, tolerance)
        deciding = [at for at in said if found[at][3]]
        floats = [at for at in deciding if pairs[at].own.dtype.name in TOLERANCES]
        told = self._axis.comm.all_gather_object((min(floats, default=None), bool(deciding)))
        decides = min((at for at, _ in told if at is not None), default=None)
        if decides is None:  # rounding may change what is picked, such as the largest of several
            return Verdict("integers differ, and no floats" if any(differs for _, differs in told) else "")
        own = min((at for at in said if at <= decides), default=None)
        everyone = self._axis.comm.all_gather_object(None if own is None else (own, said[own]))
        at, text = min(one for one in everyone if one is not None)
        ranks = [rank for rank, one in enumerate(everyone) if one is not None and one[0] == at]
        pair, step, state, _ = found[at]
        where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self._axis.size}"
        said_of = f"{pair.what} differs from the undivided model's on {where}: {text}"
        return Verdict(difference=Difference(step, state, said_of))


def refused(difference: Difference) -> UsageError:
    """Return the error for a plan that gives other numbers."""
    suspects = difference.suspects
    names = [state.source or state.by for state in (difference.state, *(one.state for one in suspects)) if state.by]
    by = names[0] if names else "the layers before"
    if suspects:
        at = " and of ".join(dict.fromkeys(one.step.at for one in suspects[-3:]))
        doubt = f"; of {at} the rules do not know whether it can take parts"
    else:
        doubt = ""
    shapes = any(one.step.kind == "shape" for one in suspects)
    return UsageError(
        f"plan: {difference}{doubt}: put the parts of {by} together before (gather=True, or a Row), or leave it whole"
        f"{', or ask the layer for its units or out_features, not its weight for a shape' * shapes}"
    )
