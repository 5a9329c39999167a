"""Plan checks: check a plan against the rules before a model is sharded, and compare the sharded model afterwards."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from commlib.buffers.available_memory import available_bytes
from commlib.comparison.agreement import digest_of, run_together
from commlib.comparison.order import note_joined
from commlib.comparison.parameter_check import GatherRanks
from commlib.dtypes import Array
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.auto_plan import AutoPlan, find_auto_plan, leave_whole
from commlib.tensor_parallel.checks.axis_equality import DIVIDE, pause_watch
from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.checks.kinds import MISSES
from commlib.tensor_parallel.checks.numeric_checks import OTHER_VALUES, PARTS, Verdict, compare_numbers, make_plan_error
from commlib.tensor_parallel.checks.trace_run import (
    FROM_OUTSIDE,
    WHOLE,
    OutputPlacements,
    TracedRun,
    compare_runs,
    outputs_of,
)
from commlib.tensor_parallel.equations import UNKNOWN_LENGTH
from commlib.tensor_parallel.plan import Plan
from commlib.tensor_parallel.rules import CheckedPlan, Doubt, PlanError, check, compare
from commlib.tensor_parallel.styles import Sequence as SequenceStyle
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.table import plan_table
from commlib.tensor_parallel.trace import ModelTrace

_FAILS = "it fails: "


class Model(Protocol):
    """A framework's model. call: the arguments of a call, in the framework's form."""

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[ModelTrace, Exception | None]:
        """Return its trace, with styled layers as single steps, and its error; if it fails, the trace up to there."""

    def run(self, call: Any, styles: Collection[str], outputs: OutputPlacements) -> TracedRun:
        """Run it forward and backward, in evaluation mode, from a sum of its outputs times `outputs.weights`."""

    def forward(
        self, call: Any, styles: Mapping[str, Style], guide: GuidedRun | None, *, evaluate: bool
    ) -> TracedRun | None:
        """Run it forward unsharded, or as one rank with its shard: see `ModelRunner` of `numeric_checks`."""

    def whole_and_part(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the unsharded call and this rank's call: see `ModelRunner` of `numeric_checks`."""

    def tensor_values(self, call: Any) -> list[Array]:
        """Return the values of its tensor arguments that have values."""

    def room(self) -> int:
        """Return the bytes available for a run in the memory of its tensors, in addition to host memory."""

    def styles(self) -> dict[str, Style]:
        """Return the styles of the sharded layers."""

    def check_layer(self, name: str, style: Style, axis: ParallelAxis) -> None:
        """Raise UsageError unless a layer can be sharded in a style among the ranks of an axis."""


def find_plan(
    model: Model,
    axis: ParallelAxis,
    plan: Any,
    call: Any,
    report: Callable[[str], object],
    others: Sequence[Model] = (),
) -> Plan:
    """Return the plan that "auto" finds for a model, and report it as a table, on rank 0. Raises UsageError.

    others: the same model in other modes, in which it may compute differently.
    """

    def able(name: str, style: Style) -> bool:
        try:
            model.check_layer(name, style, axis)
        except UsageError:
            return False
        return True

    def find() -> tuple[ModelTrace, AutoPlan]:
        if plan != "auto":
            raise UsageError(f'parallelize: plan is {plan!r}, expected styles by names of layers, or "auto"')
        if call is None:
            raise UsageError('parallelize: plan="auto" runs the model once: pass a batch as example= or verify=')
        if not callable(report):  # only rank 0 calls it
            raise UsageError(f"parallelize: report must be a function of a text, such as print, got {report!r}")
        trace = _trace(model, call, ())
        return trace, find_auto_plan(trace, axis.size, able)

    trace, result = run_together(axis.comm, find)
    _unshard_differing(model, axis, call, trace, result)
    for other in others:
        _unshard_breaking(other, axis, call, trace, result)
    table = plan_table(result.plan, result.reasons, trace, axis.size)
    if axis.rank == 0:
        report(table)
    if not result.plan:
        why = f":\n{table}" if result.reasons else "; it calls no layer that mixes features or looks up rows"
        raise UsageError(f'parallelize: plan="auto" finds no layer to shard: pass a plan{why}')
    return result.plan


def _unshard_differing(model: Model, axis: ParallelAxis, call: Any, trace: ModelTrace, result: AutoPlan) -> None:
    """Unshard layers whose numbers differ although no rule is broken: a length that is used in arithmetic.

    Layers with a user-written gradient, which numbers cannot verify, are unsharded too. Collective.
    """
    while result.plan and axis.size > 1:
        verdict = compare_numbers(model, axis, result.plan, call, divided=False)
        if verdict.difference is not None:
            leave_whole(trace, result, verdict.difference.step, verdict.difference.state, f"{verdict.difference}")
        elif verdict.failed is not None:
            leave_whole(trace, result, verdict.failed.step, verdict.failed.state, verdict.failed.text)
        else:
            doubts = check(trace, result.plan, divided_output=True, size=axis.size).doubts
            remaining = [one for one in verdict.open_doubts(doubts) if one.is_of_gradient]
            if not remaining:
                return
            leave_whole(trace, result, remaining[0].step, remaining[0].state, f"{remaining[0]}")


def _unshard_breaking(other: Model, axis: ParallelAxis, call: Any, trace: ModelTrace, result: AutoPlan) -> None:
    """Unshard layers that break a rule, or differ, in a mode in which the model deviates from its trace."""
    does, error = other.attempt(call, ())
    same = (does.steps, does.retained) == (trace.steps, trace.retained)
    if any(axis.comm.all_gather_object(error is not None or same)):
        return  # a model that fails in a mode cannot be called in it
    while result.plan:
        try:
            check(does, result.plan, divided_output=False, size=axis.size)
        except PlanError as broken:
            leave_whole(does, result, broken.step, broken.state, f"{broken}")
        else:
            break
    _unshard_differing(other, axis, call, does, result)


class PlanChecks:
    """The checks of a plan: rules before any change, shapes and numbers after it.

    call: the arguments of the model. All ranks raise the same errors.
    """

    def __init__(
        self, model: Model, axis: ParallelAxis, styles: Mapping[str, Style], call: Any, *, divided_output: bool
    ) -> None:
        self._model, self._axis, self._styles, self._call = model, axis, styles, call
        self._divided_output = divided_output
        self._run: TracedRun | None = None

        def checked() -> tuple[ModelTrace, CheckedPlan]:
            whole = _trace(model, call, styles)
            return whole, check(whole, styles, divided_output=divided_output, size=axis.size)

        self.whole, self._check_rules = run_together(axis.comm, checked)
        if self._check_rules.sequences_sharded:
            note_joined(axis.comm)
        """The trace of the unsharded model."""

    def compare_numbers(self) -> None:
        """Run the unsharded model, in full and as this rank with its shard. Raises UsageError if numbers differ.

        Rank 0 warns of doubts that neither rules nor numbers settle. Ranks must have the same values by now.
        """
        verdict = compare_numbers(self._model, self._axis, self._styles, self._call, divided=False,
                         divided_output=self._divided_output, sharded_dims=self._check_rules.sharded_dims)  # fmt: skip
        _report(verdict, self._check_rules.doubts, warns=self._axis.rank == 0)

    def keep_numbers(self) -> None:
        """Run the unsharded model, and keep its numbers for `divided`. Ranks must have the same values by now.

        Raises UsageError if the two models would be called differently.
        """
        if self._check_rules.sequences_sharded and self._axis.size > 1:
            raise UsageError(
                "parallelize: verify= calls the unsharded model and the sharded one with the same batch, but this "
                "plan calls the sharded model with each rank's part of a sequence (sequence= of the first layers). "
                "Remove verify=, or shard the sequence within the model, for example in an embedding with "
                "Vocabulary(sequence=...)"
            )
        self._run = run_together(self._axis.comm, lambda: self._model.run(self._call, self._styles, WHOLE))

    def divided(self) -> None:
        """Check the model after it was sharded. Frees the kept numbers of the unsharded model."""
        with pause_watch(self._axis):
            self._compare_divided()

    def _compare_divided(self) -> None:
        local, error = self._model.attempt(self._call, self._styles)
        if error is not None and _is_of_group(error):  # others failed before this layer, and all ranks have the error
            raise error
        run_together(self._axis.comm, lambda: self._compared(local, error))
        whole, self._run = self._run, None
        if whole is not None:
            own = self._model.run(self._call, self._styles, outputs_of(whole, self._styles, self._axis))
            compare_runs(self._axis, whole, own, self._styles, divided_output=self._divided_output)
            remaining = [doubt for doubt in self._check_rules.doubts if doubt.stays]
            _report(Verdict(), remaining, warns=self._axis.rank == 0)

    def _compared(self, local: ModelTrace, error: Exception | None) -> None:
        if error is None:
            if not self._check_rules.sequences_sharded:  # else values are from the example: a part or all
                compare(self.whole, local, self._check_rules)
            return
        check(local, self._styles, divided_output=True, size=self._axis.size)
        where = local.steps[-1].where if local.steps else "its beginning"
        raise UsageError(
            f"parallelize: the sharded model fails, at {where}: {error}. If it computes a shape from a constant "
            "of its own, such as heads, give the constant PerRank() in the plan, or use -1"
        ) from error


def check_parts(
    comm: GatherRanks,
    model: Model,
    call: Any,
    *,
    checked: bool,
    divided_output: bool,
    warns: bool,
    axis: ParallelAxis | None = None,
) -> None:
    """Check the plan of a sharded model that a pipeline calls stage by stage, and so never as one model.

    comm: of the pipeline. call: the arguments of the full model, on one rank at least, or None. checked: the plan was
    checked on this rank. axis: the axis of the sharding, to compare numbers, too: all of its ranks have a call or none.
    If no rank has a call, rank 0 warns. Collective over `comm`. Raises UsageError on all ranks.
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

        run_together(comm, check_here)
    elif warns and comm.rank == 0:
        warnings.warn(
            "pipeline: the plan of the sharded layers is not checked, because a pipeline does not call the full model. "
            "Pass example= to pipeline, or example= or verify= to parallelize",
            stacklevel=4,
        )


def _trace(model: Model, call: Any, styles: Collection[str]) -> ModelTrace:
    trace, error = model.attempt(call, styles)
    if error is not None:
        raise error
    return trace


def check_first_call(axis: ParallelAxis, model: Model, call: Any, *, divided_output: bool, warns: bool) -> str:
    """Check the first call of a sharded model: rules like `check_call`, and numbers, on all ranks of `axis`.

    The check is collective: a rank with one token may find nothing wrong, and would continue to a collective that the
    others never reach. If possible, the model runs unsharded and sharded. Returns on all ranks the error with which
    both fail, so that little was checked; "" if none. Collective over the axis. Raises UsageError on all ranks, or
    MismatchError on a rank that has continued without finding the error.
    """
    with pause_watch(axis):
        try:
            return _check_first_call(axis, model, call, divided_output=divided_output, warns=warns)
        except MismatchError as error:
            raise MismatchError(f"{error}. {_LOOKED}") from error


_LOOKED = (
    "This rank has started to check the plan of a sharded model for a new kind of call (its mode, the arguments given, "
    "flags, strings). If the other ranks have not, give the model the same arguments on all ranks"
)


def _check_first_call(axis: ParallelAxis, model: Model, call: Any, *, divided_output: bool, warns: bool) -> str:
    styles = model.styles()
    attempted = model.attempt(call, styles)
    if _is_of_group(attempted[1]):  # all ranks have this error, a mismatch: another collective would mismatch, too
        _check_rules(model, attempted, divided_output, axis.size)
    checked = run_together(axis.comm, lambda: _check_rules(model, attempted, divided_output, axis.size))
    if checked.sequences_sharded:
        note_joined(axis.comm)
    digest = _digest_of_parts(model.tensor_values(call), styles) if checked.sequences_sharded else 0
    way = digest_of(_describe_steps(attempted[0]))
    answers = axis.comm.all_gather_object(
        (_why_not_comparable(model, axis, attempted, checked), digest, checked.sharded_dims, way)
    )
    ways, fail = [way for *_, way in answers], any(text.startswith(_FAILS) for text, *_ in answers)
    if warns and len(set(ways)) > 1 and not fail:
        _warn_of_other_steps(axis, ways)
    if digest and axis.size > 1 and all(other == digest for _, other, *_ in answers):
        raise UsageError(
            f"plan: all ranks of {axis.comm.name} call the model with the same values, but layers with sequence= "
            f"expect each rank's part of a sequence: {DIVIDE}"
        )
    reason = next((text for text, *_ in answers if text), "")
    verdict = Verdict(reason if all(one[2] == checked.sharded_dims for one in answers) else PARTS)
    fails = next((text.removeprefix(_FAILS) for text, *_ in answers if text.startswith(_FAILS)), "")
    if fails:
        _refuse_failing(axis, model, call, attempted)
    if not verdict.undecided:
        verdict = compare_numbers(
            model, axis, styles, call, divided=True, divided_output=divided_output, sharded_dims=checked.sharded_dims
        )
    if warns and verdict.undecided.startswith(OTHER_VALUES):
        which = verdict.undecided.removeprefix(OTHER_VALUES)
        warnings.warn(
            f"plan: ranks of {axis.comm.name} call the model with different values{which}: unsharded inputs must be "
            "the same on all of them. Give all ranks the same batches, in the same order",
            stacklevel=4,
        )
    _report(verdict, checked.doubts, warns=warns)
    return fails


def _describe_steps(trace: ModelTrace) -> list[str]:
    """Return the steps of a model as lines that are the same on all ranks: layers are numbered by their first call."""
    places: dict[str, int] = {"": 0}
    steps = [step for step in trace.steps if step.kind not in FROM_OUTSIDE]
    return [f"{places.setdefault(step.layer, len(places))} {step.text.partition(' in ')[0]}" for step in steps]


def _warn_of_other_steps(axis: ParallelAxis, ways: Sequence[int]) -> None:
    others = [rank for rank, way in enumerate(ways) if way != ways[0]]
    warnings.warn(
        f"plan: ranks {others} of {axis.comm.name} run other operations in this call of the model than rank 0. All "
        "must run the same operations: give all ranks the same flags, arguments and settings",
        stacklevel=5,
    )


def _digest_of_parts(arrays: Sequence[Array], styles: Mapping[str, Style]) -> int:
    """Return a digest of a rank's sequence shards; 0 if all positions are equal, which is inconclusive."""
    dims = {
        dim
        for style in styles.values()
        if (dim := style.dim if isinstance(style, SequenceStyle) else getattr(style, "sequence", None)) is not None
    }
    parts = [(one, dim) for one in arrays for dim in dims if -one.ndim <= dim < one.ndim and one.size]
    if not any((part != part.take([0], dim)).any() for part, dim in parts):
        return 0
    return digest_of([f"{one.dtype}{one.shape} {zlib.crc32(np.ascontiguousarray(one).tobytes())}" for one in arrays])


def _refuse_failing(
    axis: ParallelAxis, model: Model, call: Any, attempted: tuple[ModelTrace, Exception | None]
) -> None:
    """Raise UsageError if a sharded model fails with a call that works on the unsharded model. Collective."""
    whole = model.forward(call, model.styles(), None, evaluate=False)
    works = axis.comm.all_gather_object(whole is not None and whole.error is None)
    trace, error = attempted
    if all(works):
        run_together(axis.comm, lambda: _raise_failing(trace, error))


def _raise_failing(trace: ModelTrace, error: Exception | None) -> None:
    if isinstance(error, UsageError):
        raise error
    if error is not None:
        last = trace.steps[-1] if trace.steps else None
        where = "at its beginning" if last is None else f"{'after' if last.outputs else 'at'} {last.at}"
        raise UsageError(
            f"plan: with this rank's shard the model fails, {where}, unlike unsharded: {f'{error}'.rstrip('.')}. "
            "If it computes with a constant, such as heads or channels, that must be the rank's number, give "
            "it PerRank(), or use -1, or gather the shards before (gather=True, or a Row)"
        ) from error


def _why_not_comparable(
    model: Model, axis: ParallelAxis, attempted: tuple[ModelTrace, Exception | None], checked: CheckedPlan
) -> str:
    trace, error = attempted
    if error is not None:
        return f"{_FAILS}{error}"
    if checked.inputs_sharded and not checked.sharded_dims:
        return PARTS
    # Memory of a run of the unsharded model: four bytes for each of its values, and again for the values of each rank.
    known_shapes = ((value, shape) for value, shape in trace.shapes.items() if UNKNOWN_LENGTH not in shape)
    sizes = ((prod(shape), checked.states[value].is_divided) for value, shape in known_shapes)
    most = 4 * sum(size * (axis.size + 1 if is_divided else 2) for size, is_divided in sizes)
    room = min(available_bytes() // axis.size, model.room())
    return "" if most <= room else f"the full model needs some {most >> 20} MiB, and a rank has {room >> 20} MiB"


def _report(verdict: Verdict, doubts: Sequence[Doubt], *, warns: bool) -> None:
    """Raise UsageError if numbers differ; warn of doubts that neither rules nor numbers settle."""
    if verdict.difference is not None:
        raise make_plan_error(verdict.difference)
    if verdict.failed is not None and verdict.failed.proves:
        raise UsageError(verdict.failed.text)
    _warn(verdict.open_doubts(doubts) if warns else (), verdict.undecided)


def describe_unchecked(model: str, layer: str) -> str:
    """Return the warning for a sharded layer that is called while its model was never called and checked."""
    return (
        f"the plan of the sharded layers of {model} is not checked: {layer} is called before the model itself. Call "
        "the model, or pass example= or verify= to parallelize"
    )


def describe_failed_check(model: str, error: str) -> str:
    """Return the warning for a call that works although its check failed, so the plan is not checked."""
    return (
        f"plan: {model} failed in the check of its call, but not in the call itself, so its plan is not checked: "
        f"{error}"
    )


def describe_repeated_failure(model: str, error: str) -> str:
    """Return the warning for a kind of call whose check has failed so often that it is not tried again."""
    return (
        f"plan: {model} has failed {MISSES} times in the check of such a call, so its plan is not checked for calls "
        f"like this. Pass parallelize an example= of one that does not fail: {error}"
    )


def describe_late_layer(what: str, error: str) -> str:
    """Return the error for a model that has become invalid through a layer added after sharding."""
    return (
        f"{what} was added after the model was sharded: {error}. Add it before, so that the plan shards it, too, or "
        "shard its layers with another call of parallelize"
    )


def describe_outside_call(model: str, layer: str, *, takes: bool = False) -> str:
    """Return the warning for a sharded layer called outside its model. takes: it takes a shard, else it returns one."""
    does, option = ("takes", "split") if takes else ("returns", "gather")
    return (
        f"plan: {layer} is called outside of {model}, whose plan was checked: it {does} this rank's shard, which "
        f"cannot be checked outside the model. Call the model, or give the layer {option}=True"
    )


def describe_too_many_kinds(model: str, looked: int) -> str:
    """Return the warning for a model that is called in more kinds of calls than are checked."""
    return (
        f"plan: {model} is called in more than {looked} ways (modes, arguments that are given, flags and strings). Its "
        "plan was checked only for the first ones. Pass values that change with every call as tensors or numbers"
    )


def check_call(model: Model, call: Any, *, divided_output: bool, warns: bool) -> None:
    """Check the rules for a call of a sharded model. Raises PlanError, a UsageError.

    warns: warn of open doubts.
    """
    checked = _check_rules(model, model.attempt(call, model.styles()), divided_output)
    _warn(checked.doubts if warns else (), "a pipeline does not call the full model")


def _check_rules(
    model: Model, attempted: tuple[ModelTrace, Exception | None], divided_output: bool, size: int = 1
) -> CheckedPlan:
    trace, error = attempted
    # If it failed for a reason other than the plan, the call itself will fail too.
    rules = check(trace, model.styles(), divided_output=divided_output or error is not None, size=size)
    if error is not None and _is_of_group(error):
        raise error
    return rules


def _is_of_group(error: Exception | None) -> bool:
    return isinstance(error, CommlibError) and not isinstance(error, UsageError)


def _warn(doubts: Sequence[Doubt], reason: str) -> None:
    if doubts:
        more = f" ({len(doubts) - 1} more like this)" if len(doubts) > 1 else ""
        why = f"; numbers could not settle it either: {reason}" if reason else ""
        warnings.warn(f"plan: {doubts[0]}{more}{why}", stacklevel=5)
