"""Checks: hold a plan against the rules before a model is divided, and what the divided model does after that."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from commlib.buffers.available import available
from commlib.comparison.agreement import digest_of, together
from commlib.comparison.order import note_joined
from commlib.comparison.parameter_check import Gathers
from commlib.dtypes import Array
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.auto import Found, auto, leave_whole
from commlib.tensor_parallel.checks.alike import DIVIDE, unwatched
from commlib.tensor_parallel.checks.guide import Guide
from commlib.tensor_parallel.checks.kinds import MISSES
from commlib.tensor_parallel.checks.numbers import OTHER_VALUES, PARTS, Verdict, judged, refused
from commlib.tensor_parallel.checks.runs import FROM_OUTSIDE, WHOLE, Outputs, Run, compare_runs, outputs_of
from commlib.tensor_parallel.equations import UNKNOWN_LENGTH
from commlib.tensor_parallel.plan import Plan
from commlib.tensor_parallel.rules import Checked, Doubt, PlanError, check, compare
from commlib.tensor_parallel.styles import Sequence as SequenceStyle
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.table import plan_table
from commlib.tensor_parallel.trace import Trace

_FAILS = "it fails: "


class Model(Protocol):
    """A framework's model. call: with what it is called, as the framework has it."""

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return its trace, for which layers with styles are taken as a whole; if it fails, as far as it came."""

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run it forward and backward, in evaluation mode, from a sum of its outputs times `outputs.weights`."""

    def forward(self, call: Any, styles: Mapping[str, Style], guide: Guide | None, *, evaluate: bool) -> Run | None:
        """Run it forward, unsharded or as one rank with its part: see `commlib.tensor_parallel.checks.numbers.Runs`."""

    def apart(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the call of the whole and that of this rank: see `commlib.tensor_parallel.checks.numbers.Runs`."""

    def given(self, call: Any) -> list[Array]:
        """Return the values of the tensors that it is called with; none of those that have none."""

    def room(self) -> int:
        """Return how many bytes a run of it may take where its tensors are, beside the host's memory."""

    def styles(self) -> dict[str, Style]:
        """Return the styles of the layers that are divided."""

    def check_layer(self, name: str, style: Style, axis: Axis) -> None:
        """Raise UsageError unless a layer can be divided in a style among the ranks of an axis."""


def found_plan(
    model: Model, axis: Axis, plan: Any, call: Any, report: Callable[[str], object], others: Sequence[Model] = ()
) -> Plan:
    """Return the plan that "auto" finds for a model, and report it as a table, on rank 0. Raises UsageError.

    others: the same model in other modes, where it may do something else.
    """

    def able(name: str, style: Style) -> bool:
        try:
            model.check_layer(name, style, axis)
        except UsageError:
            return False
        return True

    def find() -> tuple[Trace, Found]:
        if plan != "auto":
            raise UsageError(f'parallelize: plan is {plan!r}, expected styles by names of layers, or "auto"')
        if call is None:
            raise UsageError('parallelize: plan="auto" runs the model once: give example=, or verify=, a batch for it')
        trace = _traced(model, call, ())
        return trace, auto(trace, axis.size, able)

    trace, found = together(axis.comm, find)
    _leave_what_differs(model, axis, call, trace, found)
    for other in others:
        _leave_what_breaks(other, axis, call, trace, found)
    table = plan_table(found.plan, found.reasons, trace, axis.size)
    if axis.rank == 0:
        report(table)
    if not found.plan:
        why = f":\n{table}" if found.reasons else "; it calls none that mixes features or looks rows up"
        raise UsageError(f'parallelize: plan="auto" finds no layer that it could divide: give a plan{why}')
    return found.plan


def _leave_what_differs(model: Model, axis: Axis, call: Any, trace: Trace, found: Found) -> None:
    """Leave whole what gives other numbers, though no rule says so: a length that is used in arithmetic.

    So is what has a gradient that somebody has written, where numbers cannot tell of it. Collective.
    """
    while found.plan and axis.size > 1:
        verdict = judged(model, axis, found.plan, call, divided=False)
        if verdict.difference is not None:
            leave_whole(trace, found, verdict.difference.step, verdict.difference.state, f"{verdict.difference}")
        elif verdict.failed is not None:
            leave_whole(trace, found, verdict.failed.step, verdict.failed.state, verdict.failed.said)
        else:
            doubts = check(trace, found.plan, divided_output=True, size=axis.size).doubts
            left = [one for one in verdict.left(doubts) if one.is_of_gradient]
            if not left:
                return
            leave_whole(trace, found, left[0].step, left[0].state, f"{left[0]}")


def _leave_what_breaks(other: Model, axis: Axis, call: Any, trace: Trace, found: Found) -> None:
    """Leave whole what breaks a rule, or differs, in a mode in which the model does not what its trace says."""
    does, error = other.attempt(call, ())
    same = (does.steps, does.kept) == (trace.steps, trace.kept)
    if any(axis.comm.all_gather_object(error is not None or same)):
        return  # a model that fails so cannot be called so
    while found.plan:
        try:
            check(does, found.plan, divided_output=False, size=axis.size)
        except PlanError as broken:
            leave_whole(does, found, broken.step, broken.state, f"{broken}")
        else:
            break
    _leave_what_differs(other, axis, call, does, found)


class Checks:
    """What is checked of a plan: the rules before anything is changed, shapes and numbers after that.

    call: with what the model is called. All ranks raise alike.
    """

    def __init__(
        self, model: Model, axis: Axis, styles: Mapping[str, Style], call: Any, *, divided_output: bool
    ) -> None:
        self._model, self._axis, self._styles, self._call = model, axis, styles, call
        self._divided_output = divided_output
        self._run: Run | None = None

        def checked() -> tuple[Trace, Checked]:
            whole = _traced(model, call, styles)
            return whole, check(whole, styles, divided_output=divided_output, size=axis.size)

        self.whole, self._checked = together(axis.comm, checked)
        if self._checked.sequences_came:
            note_joined(axis.comm)
        """The trace of the undivided model."""

    def compare_numbers(self) -> None:
        """Run the undivided model as a whole, and as this rank with its part. Raises UsageError for other numbers.

        Rank 0 warns of what can be told neither by rules nor so. Ranks have the same values by now.
        """
        verdict = judged(self._model, self._axis, self._styles, self._call, divided=False,
                         divided_output=self._divided_output, came=self._checked.came)  # fmt: skip
        _settle(verdict, self._checked.doubts, warns=self._axis.rank == 0)

    def keep_numbers(self) -> None:
        """Run the undivided model, for `divided` to compare numbers as well. Ranks have the same values by now.

        Raises UsageError where the two would not be called alike.
        """
        if self._checked.sequences_came and self._axis.size > 1:
            raise UsageError(
                "parallelize: verify= calls the undivided model, and the divided one, with the same batch, but by this "
                "plan the divided one is called with each rank's part of a sequence (sequence= of the first layers): "
                "leave verify= out, or let the sequence be divided within the model, as by an embedding with "
                "Vocabulary(sequence=...)"
            )
        self._run = together(self._axis.comm, lambda: self._model.run(self._call, self._styles, WHOLE))

    def divided(self) -> None:
        """Check the model after it was divided. What was kept of the undivided one goes."""
        with unwatched(self._axis):
            self._compare_divided()

    def _compare_divided(self) -> None:
        local, error = self._model.attempt(self._call, self._styles)
        if error is not None and _is_of_group(error):  # others failed before this layer, and say so: all know by now
            raise error
        together(self._axis.comm, lambda: self._compared(local, error))
        whole, self._run = self._run, None
        if whole is not None:
            own = self._model.run(self._call, self._styles, outputs_of(whole, self._styles, self._axis))
            compare_runs(self._axis, whole, own, self._styles, divided_output=self._divided_output)
            left = [doubt for doubt in self._checked.doubts if doubt.stays]
            _settle(Verdict(), left, warns=self._axis.rank == 0)

    def _compared(self, local: Trace, error: Exception | None) -> None:
        if error is None:
            if not self._checked.sequences_came:  # else gathered of what the example is: a part, or all of it
                compare(self.whole, local, self._checked)
            return
        check(local, self._styles, divided_output=True, size=self._axis.size)
        where = local.steps[-1].where if local.steps else "its beginning"
        raise UsageError(
            f"parallelize: the divided model fails, at {where}: {error}. If it asks for a shape by a number of its "
            "own, such as heads, give that PerRank() in the plan, or let it say -1"
        ) from error


def check_parts(
    comm: Gathers,
    model: Model,
    call: Any,
    *,
    checked: bool,
    divided_output: bool,
    warns: bool,
    axis: Axis | None = None,
) -> None:
    """Check the plan of a divided model that a pipeline calls part by part, and so never as a whole.

    comm: of the pipeline. call: with what the whole is called, on one rank at least, or None. checked: the plan was
    checked on this rank. axis: among which it is divided, to compare numbers, too: all of its ranks have a call or
    none. Where no rank can tell, rank 0 warns. Collective over `comm`. Raises UsageError on all ranks.
    """
    everyone = comm.all_gather_object((checked, call is not None))
    if any(done for done, _ in everyone):
        return
    if any(has_call for _, has_call in everyone):

        def check_here() -> None:
            if call is not None and axis is not None:
                check_first_call(axis, model, call, divided_output=divided_output, warns=warns)
            elif call is not None:
                check_call(model, call, divided_output=divided_output, warns=warns)

        together(comm, check_here)
    elif warns and comm.rank == 0:
        warnings.warn(
            "pipeline: the plan of the divided layers is not checked: that is done when the model is called, which a "
            "pipeline does not do. Give pipeline an example=, or parallelize an example= or verify=",
            stacklevel=4,
        )


def _traced(model: Model, call: Any, styles: Collection[str]) -> Trace:
    trace, error = model.attempt(call, styles)
    if error is not None:
        raise error
    return trace


def check_first_call(axis: Axis, model: Model, call: Any, *, divided_output: bool, warns: bool) -> str:
    """Check the first call of a model that is divided: the rules as `check_call`, and numbers, on all ranks of `axis`.

    A rank whose part is one token may see nothing wrong, and go on to where the others never come. The model is run as
    the whole that it was, and with its parts, if it can be. Returns on all ranks with what the model fails, as the
    whole does, so that little was checked; "" if it does not. Collective over the axis. Raises UsageError on all ranks,
    or MismatchError on one that has gone on and cannot tell why.
    """
    with unwatched(axis):
        try:
            return _check_first_call(axis, model, call, divided_output=divided_output, warns=warns)
        except MismatchError as error:
            raise MismatchError(f"{error}. {_LOOKED}") from error


_LOOKED = (
    "This rank has begun to check a divided model's plan for a call of another kind than those before (its mode, which "
    "arguments are given, flags, strings): if the others have not, give the model the same ones on all ranks"
)


def _check_first_call(axis: Axis, model: Model, call: Any, *, divided_output: bool, warns: bool) -> str:
    styles = model.styles()
    attempted = model.attempt(call, styles)
    if _is_of_group(attempted[1]):  # ranks made different calls, and all know: to meet once more would be another one
        _checked(model, attempted, divided_output, axis.size)
    checked = together(axis.comm, lambda: _checked(model, attempted, divided_output, axis.size))
    if checked.sequences_came:
        note_joined(axis.comm)
    came = _digest_of_parts(model.given(call), styles) if checked.sequences_came else 0
    way = digest_of(_way(attempted[0]))
    told = axis.comm.all_gather_object((_not_comparable(model, axis, attempted, checked), came, checked.came, way))
    ways, fail = [way for *_, way in told], any(said.startswith(_FAILS) for said, *_ in told)
    if warns and len(set(ways)) > 1 and not fail:
        _warn_of_other_ways(axis, ways)
    if came and axis.size > 1 and all(other == came for _, other, *_ in told):
        raise UsageError(
            f"plan: all ranks of {axis.comm.name} call the model with the same values, but by layers with sequence= "
            f"it takes each rank's part of a sequence: {DIVIDE}"
        )
    untold = next((said for said, *_ in told if said), "")
    verdict = Verdict(untold if all(one[2] == checked.came for one in told) else PARTS)
    fails = next((said.removeprefix(_FAILS) for said, *_ in told if said.startswith(_FAILS)), "")
    if fails:
        _refuse_failing(axis, model, call, attempted)
    if not verdict.untold:
        verdict = judged(model, axis, styles, call, divided=True, divided_output=divided_output, came=checked.came)
    if warns and verdict.untold.startswith(OTHER_VALUES):
        which = verdict.untold.removeprefix(OTHER_VALUES)
        warnings.warn(
            f"plan: ranks of {axis.comm.name} call the model with other values than one another{which}: what is whole "
            "must be the same on all of them: give all the same batch, in the same order",
            stacklevel=4,
        )
    _settle(verdict, checked.doubts, warns=warns)
    return fails


def _way(trace: Trace) -> list[str]:
    """Return what a model does, in lines that are the same on all ranks: layers by the order of their first calls."""
    places: dict[str, int] = {"": 0}
    steps = [step for step in trace.steps if step.kind not in FROM_OUTSIDE]
    return [f"{places.setdefault(step.layer, len(places))} {step.text.partition(' in ')[0]}" for step in steps]


def _warn_of_other_ways(axis: Axis, ways: Sequence[int]) -> None:
    others = [rank for rank, way in enumerate(ways) if way != ways[0]]
    warnings.warn(
        f"plan: ranks {others} of {axis.comm.name} do something else in this call of the model than rank 0: what goes "
        "on in it must be the same on all of them: give all the same flags, arguments and settings",
        stacklevel=5,
    )


def _digest_of_parts(given: Sequence[Array], styles: Mapping[str, Style]) -> int:
    """Return a digest of what a rank has of sequences; 0 if that tells nothing, since all positions are the same."""
    dims = {
        dim
        for style in styles.values()
        if (dim := style.dim if isinstance(style, SequenceStyle) else getattr(style, "sequence", None)) is not None
    }
    parts = [(one, dim) for one in given for dim in dims if -one.ndim <= dim < one.ndim and one.size]
    if not any((part != part.take([0], dim)).any() for part, dim in parts):
        return 0
    return digest_of([f"{one.dtype}{one.shape} {zlib.crc32(np.ascontiguousarray(one).tobytes())}" for one in given])


def _refuse_failing(axis: Axis, model: Model, call: Any, attempted: tuple[Trace, Exception | None]) -> None:
    """Raise UsageError where a divided model fails with a call that the whole can be made with. Collective."""
    whole = model.forward(call, model.styles(), None, evaluate=False)
    works = axis.comm.all_gather_object(whole is not None and whole.error is None)
    trace, error = attempted
    if all(works):
        together(axis.comm, lambda: _raise_failing(trace, error))


def _raise_failing(trace: Trace, error: Exception | None) -> None:
    if isinstance(error, UsageError):
        raise error
    if error is not None:
        last = trace.steps[-1] if trace.steps else None
        where = "at its beginning" if last is None else f"{'after' if last.outputs else 'at'} {last.at}"
        raise UsageError(
            f"plan: with this rank's part the model fails, {where}, as the whole does not: {f'{error}'.rstrip('.')}. "
            "If it goes by a number of its own, such as heads or channels, that is to be the rank's: give it "
            "PerRank(), or -1, or put the parts together before (gather=True, or a Row)"
        ) from error


def _not_comparable(model: Model, axis: Axis, attempted: tuple[Trace, Exception | None], checked: Checked) -> str:
    trace, error = attempted
    if error is not None:
        return f"{_FAILS}{error}"
    if checked.came_in_parts and not checked.came:
        return PARTS
    # What a run of the whole keeps: numbers of four bytes, of all its values, and once more of a rank's.
    known = ((value, shape) for value, shape in trace.shapes.items() if UNKNOWN_LENGTH not in shape)
    sizes = ((prod(shape), checked.states[value].is_divided) for value, shape in known)
    most = 4 * sum(size * (axis.size + 1 if is_divided else 2) for size, is_divided in sizes)
    room = min(available() // axis.size, model.room())
    return "" if most <= room else f"the whole would take some {most >> 20} MiB, and there are {room >> 20} for a rank"


def _settle(verdict: Verdict, doubts: Sequence[Doubt], *, warns: bool) -> None:
    """Raise UsageError for other numbers; say as a warning what can be told neither by rules nor by numbers."""
    if verdict.difference is not None:
        raise refused(verdict.difference)
    if verdict.failed is not None and verdict.failed.proves:
        raise UsageError(verdict.failed.said)
    _warn(verdict.left(doubts) if warns else (), verdict.untold)


def not_checked(model: str, layer: str) -> str:
    """Return what is said where a divided layer is called, and its model was not, so that no call could be checked."""
    return (
        f"the plan of the divided layers of {model} is not checked: {layer} is called before the model itself is. Call "
        "the model, or give parallelize an example= or verify="
    )


def failed_alone(model: str, error: str) -> str:
    """Return what is said where a call goes on that had failed when it was looked at, so that nobody knows it."""
    return (
        f"plan: {model} failed when its call was looked at, and the call itself did not, so its plan is not checked: "
        f"{error}"
    )


def failed_again(model: str, error: str) -> str:
    """Return what is said where calls of a kind have failed so often when they were looked at that no more are."""
    return (
        f"plan: {model} has failed {MISSES} times when such a call was looked at, so its plan is not checked for calls "
        f"like this: give parallelize an example= of one that does not fail: {error}"
    )


def put_later(what: str, error: str) -> str:
    """Return the error for a model that is wrong since something came when it was divided already."""
    return (
        f"{what} came after the model was divided: {error}; put it there before, so that the plan divides it, too, or "
        "divide its layers by one more call of parallelize"
    )


def called_outside(model: str, layer: str, *, takes: bool = False) -> str:
    """Return what is said where a divided layer is called outside of its model. takes: a part, else it returns one."""
    does, option = ("takes", "split") if takes else ("returns", "gather")
    return (
        f"plan: {layer} is called outside of {model}, whose plan was checked: it {does} this rank's part, and nothing "
        f"tells whether that is right there: call the model, or give it {option}=True"
    )


def too_many_kinds(model: str, looked: int) -> str:
    """Return what is said where a model is called in more ways than are looked at."""
    return (
        f"plan: {model} is called in more than {looked} ways (modes, arguments that are given, flags and strings): its "
        "plan was checked for the first ones alone: give as tensors or numbers what changes with every call"
    )


def check_call(model: Model, call: Any, *, divided_output: bool, warns: bool) -> None:
    """Check the rules for a call of a model that is divided. Raises PlanError, a UsageError.

    warns: say as a warning what could not be told.
    """
    checked = _checked(model, model.attempt(call, model.styles()), divided_output)
    _warn(checked.doubts if warns else (), "a pipeline does not call the model as a whole")


def _checked(model: Model, attempted: tuple[Trace, Exception | None], divided_output: bool, size: int = 1) -> Checked:
    trace, error = attempted
    # Where it failed for another reason than the plan, so will the call.
    found = check(trace, model.styles(), divided_output=divided_output or error is not None, size=size)
    if error is not None and _is_of_group(error):
        raise error
    return found


def _is_of_group(error: Exception | None) -> bool:
    return isinstance(error, CommlibError) and not isinstance(error, UsageError)


def _warn(doubts: Sequence[Doubt], untold: str) -> None:
    if doubts:
        more = f" ({len(doubts) - 1} more like this)" if len(doubts) > 1 else ""
        why = f"; numbers could not tell it either: {untold}" if untold else ""
        warnings.warn(f"plan: {doubts[0]}{more}{why}", stacklevel=5)
