"""Checks: hold a plan against the rules before a model is divided, and what the divided model does after that."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from commlib.data_parallel.parameter_check import Gathers
from commlib.errors import CommlibError, UsageError
from commlib.functional.agreement import together
from commlib.functional.axis import Axis
from commlib.functional.runs import WHOLE, Outputs, Run, compare_runs, outputs_of
from commlib.tensor.auto import Found, auto
from commlib.tensor.plan import Plan
from commlib.tensor.rules import Checked, check, compare
from commlib.tensor.styles import Style
from commlib.tensor.table import plan_table
from commlib.tensor.trace import Trace


class Model(Protocol):
    """A framework's model. call: with what it is called, as the framework has it."""

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return its trace, for which layers with styles are taken as a whole; if it fails, as far as it came."""

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run it forward and backward, in evaluation mode, from a sum of its outputs times `outputs.weights`."""

    def styles(self) -> dict[str, Style]:
        """Return the styles of the layers that are divided."""

    def check_layer(self, name: str, style: Style, axis: Axis) -> None:
        """Raise UsageError unless a layer can be divided in a style among the ranks of an axis."""


def found_plan(model: Model, axis: Axis, plan: Any, call: Any, report: Callable[[str], object]) -> Plan:
    """Return the plan that "auto" finds for a model, and report it as a table, on rank 0. Raises UsageError."""

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
    if axis.rank == 0:
        report(plan_table(found.plan, found.reasons, trace, axis.size))
    if not found.plan:
        raise UsageError('parallelize: plan="auto" finds no layer that it could divide: give a plan')
    return found.plan


class Checks:
    """What is checked of a plan: the rules before anything is changed, shapes and numbers after that.

    call: with what the model is called. All ranks raise alike.
    """

    def __init__(
        self, model: Model, axis: Axis, styles: Mapping[str, Style], call: Any, *, divided_output: bool
    ) -> None:
        self._model, self._axis, self._styles, self._call = model, axis, styles, call
        self._run: Run | None = None

        def checked() -> tuple[Trace, Checked]:
            whole = _traced(model, call, styles)
            return whole, check(whole, styles, divided_output=divided_output)

        self._whole, self._checked = together(axis.comm, checked)

    def keep_numbers(self) -> None:
        """Run the undivided model, for `divided` to compare numbers as well. Ranks have the same values by now."""
        self._run = together(self._axis.comm, lambda: self._model.run(self._call, self._styles, WHOLE))

    def divided(self) -> None:
        """Check the model after it was divided. What was kept of the undivided one goes."""
        local, error = self._model.attempt(self._call, self._styles)
        together(self._axis.comm, lambda: self._compared(local, error))
        whole, self._run = self._run, None
        if whole is not None:
            own = self._model.run(self._call, self._styles, outputs_of(whole, self._styles, self._axis))
            compare_runs(self._axis, whole, own, self._styles)

    def _compared(self, local: Trace, error: Exception | None) -> None:
        if error is None:
            compare(self._whole, local, self._checked)
            return
        check(local, self._styles, divided_output=True)
        where = local.steps[-1].where if local.steps else "its beginning"
        raise UsageError(f"parallelize: the divided model fails, at {where}: {error}") from error


def check_parts(comm: Gathers, model: Model, call: Any, *, checked: bool, divided_output: bool, warns: bool) -> None:
    """Check the plan of a divided model that a pipeline calls part by part, and so never as a whole.

    comm: of the pipeline. call: with what the whole is called, on one rank at least, or None. checked: the plan was
    checked on this rank. Where no rank can tell, rank 0 warns. Collective over `comm`. Raises UsageError on all ranks.
    """
    everyone = comm.all_gather_object((checked, call is not None))
    if any(done for done, _ in everyone):
        return
    if any(has_call for _, has_call in everyone):

        def check_here() -> None:
            if call is not None:
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


def check_first_call(comm: Gathers, model: Model, call: Any, *, divided_output: bool, warns: bool) -> None:
    """Check the rules for the first call of a model that is divided: as `check_call`, on all ranks of `comm`.

    A rank whose part is one token may see nothing wrong, and go on to where the others never come. Collective over
    `comm`. Raises UsageError on all ranks, or MismatchError on one that has gone on and cannot tell why.
    """
    attempted = model.attempt(call, model.styles())
    doubts: Sequence[str]
    if _is_of_group(attempted[1]):  # ranks made different calls, and all know: to meet once more would be another one
        doubts = _doubts(model, attempted, divided_output)
    else:
        doubts = together(comm, lambda: _doubts(model, attempted, divided_output))
    _warn(doubts if warns else ())


def check_call(model: Model, call: Any, *, divided_output: bool, warns: bool) -> None:
    """Check the rules for a call of a model that is divided. Raises PlanError, a UsageError.

    warns: say as a warning what could not be told.
    """
    doubts = _doubts(model, model.attempt(call, model.styles()), divided_output)
    _warn(doubts if warns else ())


def _doubts(model: Model, attempted: tuple[Trace, Exception | None], divided_output: bool) -> Sequence[str]:
    trace, error = attempted
    # Where it failed for another reason than the plan, so will the call.
    doubts = check(trace, model.styles(), divided_output=divided_output or error is not None).doubts
    if error is not None and _is_of_group(error):
        raise error
    return doubts


def _is_of_group(error: Exception | None) -> bool:
    return isinstance(error, CommlibError) and not isinstance(error, UsageError)


def _warn(doubts: Sequence[str]) -> None:
    if doubts:
        more = f" ({len(doubts) - 1} more like this)" if len(doubts) > 1 else ""
        warnings.warn(f"{doubts[0]}{more}", stacklevel=4)
