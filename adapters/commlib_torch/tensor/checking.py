"""Checking: hold a plan against the rules, by an example before a model is divided, else at its first call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from commlib.errors import UsageError
from commlib.functional.agreement import together
from commlib.functional.axis import Axis
from commlib.tensor.auto import auto
from commlib.tensor.plan import Plan
from commlib.tensor.rules import check, compare
from commlib.tensor.styles import Style
from commlib.tensor.table import plan_table
from commlib.tensor.trace import Trace
from commlib_torch.tensor.layers import find_layer
from commlib_torch.tensor.tracing import arguments_of, attempted, styles_in, trace
from commlib_torch.tensor.verify import verify


def found_plan(model: nn.Module, axis: Axis, plan: Any, batch: Any, report: Callable[[str], object]) -> Plan:
    """Return the plan that "auto" finds for a model, and report it as a table, on rank 0. Raises UsageError."""
    if plan != "auto":
        raise UsageError(f'parallelize: plan is {plan!r}, expected styles by names of layers, or "auto"')
    if batch is None:
        raise UsageError('parallelize: plan="auto" runs the model once: give example=, or verify=, a batch for it')
    modules = dict(model.named_modules())

    def able(name: str, style: Style) -> bool:
        try:
            return find_layer(name, modules[name], style) is not None
        except UsageError:
            return False

    seen = trace(model, *arguments_of(batch))
    found = auto(seen, axis.size, able)
    if axis.rank == 0:
        report(plan_table(found.plan, found.reasons, seen, axis.size))
    if not found.plan:
        raise UsageError('parallelize: plan="auto" finds no layer that it could divide: give a plan')
    return found.plan


class Checks:
    """What is checked of a plan: the rules before the model is divided, shapes and numbers after that.

    Without a batch to run, the rules are checked at the model's first call. All ranks raise alike.
    """

    def __init__(
        self, model: nn.Module, axis: Axis, styles: Mapping[str, Style], batch: Any, *, numbers: bool, divided: bool
    ) -> None:
        self._axis, self._batch, self._divided = axis, batch, divided
        if batch is not None:
            first = {module: name for name, module in model.named_modules()}
            given = dict(model.named_modules(remove_duplicate=False))
            self._styles = {first[given[name]]: style for name, style in styles.items()} | styles_in(model)
            self._whole = trace(model, *arguments_of(batch), self._styles)
            self._checked = together(axis.comm, lambda: check(self._whole, self._styles, divided_output=divided))
        self._reference = copy.deepcopy(model) if numbers else None

    def divided(self, model: nn.Module) -> None:
        """Check the model after it was divided."""
        if self._batch is None:
            hook = _AtFirstCall(self._divided, self._axis.rank == 0)
            hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            return
        local, error = attempted(model, *arguments_of(self._batch), self._styles)
        together(self._axis.comm, lambda: self._compared(local, error))
        reference, self._reference = self._reference, None
        if reference is not None:
            verify(model, reference, self._axis, self._batch)

    def _compared(self, local: Trace, error: Exception | None) -> None:
        if error is None:
            compare(self._whole, local, self._checked)
            return
        check(local, self._styles, divided_output=True)
        where = local.steps[-1].where
        raise UsageError(f"parallelize: the divided model fails, at {where}: {error}") from error


class _AtFirstCall:
    """A hook that runs a model once more before its first call, checks its plan, and goes."""

    handle: Any = None

    def __init__(self, divided_output: bool, warns: bool) -> None:
        self._divided_output, self._warns = divided_output, warns

    def __call__(self, model: nn.Module, args: Any, options: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the first call that is not compiled is checked
        self.handle.remove()
        styles = styles_in(model)
        seen, error = attempted(model, args, options, styles)
        # Where it failed for another reason than the plan, so will the call.
        doubts = check(seen, styles, divided_output=self._divided_output or error is not None).doubts
        if doubts and self._warns:
            more = f" ({len(doubts) - 1} more like this)" if len(doubts) > 1 else ""
            warnings.warn(f"{doubts[0]}{more}", stacklevel=2)
