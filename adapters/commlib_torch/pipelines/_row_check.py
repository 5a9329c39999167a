"""Row checks: find out whether a stage's results for microbatches are those for the batch; layers may mix rows.

A layer's own loss may be a mean over rows or a sum: the stage runs on the same rows twice to find out. At the end of
the first batch, the stage runs on two microbatches together, and the results are compared with the results of each.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.pipeline.losses import is_close
from commlib.pipeline.row_checks import (
    AddedLossKinds,
    added_loss_fault,
    epsilon_of,
    fault_in_added,
    has_mixed,
    is_near,
    kind_of_added,
    mixing_fault,
    stage_title,
    unchecked_rows_warning,
    unknown_kind_warning,
)
from commlib.pipeline.rows import REMEDY
from commlib_torch._copies import copy_of, force_mode, preserve_random_state
from commlib_torch._trial_run import preserve_model
from commlib_torch.expert.losses import keepers_in, take_each
from commlib_torch.pipelines._batches import join_microbatches
from commlib_torch.pipelines._first_batch import find_communicating_module, preserve_state
from commlib_torch.pipelines._parts import INPUTS, OUTPUT

_Named = dict[str, Any]

_WAYS = ((0, False), (1, False), (0, True), (1, True))
"""Layouts to try for values between stages: (dimension of rows, whether values equal in both are shared)."""


_OF_FLOAT64 = 2.0**-40
"""Tolerance of float64 copies, which may contain float32 constants."""


class _StageCall(NamedTuple):
    """A stage's outputs, by name and position; the losses of its layers; and the inputs and outputs of each layer."""

    results: dict[str, Array]
    added: list[float]
    layers: list[tuple[str, list[Array], list[Array]]]


class RowCheck:
    """Checks a stage in addition to the batch, without side effects, like the first comparison with the whole model.

    where: the rows of x, in the form of `Rows`. checks: whether mixing rows is an error. A stage that communicates is
    not checked: the other ranks would have to join.
    """

    def __init__(self, stage: int, part: nn.Module, *, where: Any, checks: bool) -> None:
        self._stage, self._part, self._where, self._checks = stage, part, where, checks
        self._is_alone: bool | None = None
        self._kinds = AddedLossKinds()
        self._has_warned = self._has_compared = False
        self._keeps = bool(keepers_in(part))  # then more batches are checked, e.g. for a mean over unmasked elements
        self._seen: list[tuple[_Named, int]] = []
        self._fault = ""

    def end(self) -> None:
        """End a batch."""
        self._seen = []

    def see(self, named: _Named, rows: int) -> None:
        """Record a stage's inputs for a microbatch with this number of rows."""
        is_due = self._keeps or not self._has_compared
        if self._checks and is_due and rows and len(self._seen) < 2 and self._can_look():
            self._seen.append((_copy_inputs(named), rows))

    def sums(self, added: Sequence[Tensor], named: _Named, rows: int) -> list[bool]:
        """For each loss of the layers in a microbatch's forward, return whether it is a sum."""
        if self._can_look() and self._kinds.are_unknown([float(one.detach()) for one in added], True):
            self._learn(len(added), named, rows)
        return self._kinds.sums(len(added), True)

    def fault(self) -> str:
        """Return the error caused by microbatches; "" if there is none, or it cannot be determined."""
        if not self._fault and len(self._seen) == 2:
            self._fault = self._compare()
        self._seen = []
        return self._fault

    @property
    def _title(self) -> str:
        return stage_title(self._stage, [name for name, _ in self._part.named_children()])

    def _can_look(self) -> bool:
        if self._is_alone is None:
            self._is_alone = not any(map(_communicates, self._part.children()))
        return self._is_alone

    # Losses of layers

    def _learn(self, number: int, named: _Named, rows: int) -> None:
        """Find out which losses are sums. A loss of 0 is inconclusive."""
        why = "it cannot run on its rows twice"
        self._kinds.learn([False] * number, True)
        for training in (False, True):
            for dimension in (0, 1):
                try:
                    twice = self._merge_inputs([(named, rows), (named, rows)], dimension, shares=False)
                    with self._copy() as copied:
                        once, double, again = (
                            _call(copied, one, training=training, gradients=True).added for one in (named, twice, named)
                        )
                except Exception as error:
                    why = f"{type(error).__name__}: {str(error)[:200]}"
                    continue
                if not len(once) == len(again) == len(double) == number:
                    continue
                kinds = [kind_of_added(*one, self._epsilon) for one in zip(once, again, double, strict=True)]
                self._kinds.learn(kinds, True)
                if None in kinds and self._checks:
                    self._fault = added_loss_fault(self._title)
                return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(unknown_kind_warning(self._stage, why), stacklevel=2)

    # Mixed rows

    def _compare(self) -> str:
        """Return the difference if two microbatches run together; "" also if no layout can run."""
        fault, has_run = "", False
        refusal: Exception | None = None
        for dimension, shares in _WAYS:
            try:
                given = [*(named for named, _ in self._seen), self._merge_inputs(self._seen, dimension, shares=shares)]
            except Exception:  # the dimension of rows is unknown
                continue
            try:
                with self._copy() as copied:
                    difference = self._difference(copied, given)
                if difference and self._is_of_rounding(given):
                    difference = ""
            except Exception as error:  # a layout that does not run cannot be checked
                refusal = refusal or error
                continue
            self._has_compared = has_run = True
            if not difference:
                return ""
            fault = fault or difference
        if refusal is not None and not has_run and self._has_known_rows():
            self._has_compared = True
            warnings.warn(f"{unchecked_rows_warning(self._title, refusal)}: {REMEDY}", stacklevel=2)
        return fault

    def _has_known_rows(self) -> bool:
        """Return whether the stage's inputs were merged as in a larger microbatch, as far as known.

        The rows of x are given by rows=; a number from another stage may depend on the rows in any way.
        """
        named, _ = self._seen[0]
        return INPUTS in named or all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(named))

    def _is_of_rounding(self, given: Sequence[_Named]) -> bool:
        """Return whether the difference vanishes in float64; if float64 does not run, whether it is small."""
        if self._epsilon <= epsilon_of("float64"):
            return False
        with self._copy() as copied, ExitStack() as exact:
            for device in {"cpu", *(one.device.type for one in self._part.parameters())}:
                exact.enter_context(torch.autocast(device, enabled=False))
            try:
                copied.double()
                return not self._difference(copied, [_to_float64(named) for named in given], epsilon=_OF_FLOAT64)
            except Exception:
                pass
        with self._copy() as copied:
            return not self._difference(copied, given, epsilon=epsilon_of("bfloat16"))

    def _difference(self, copied: nn.Module, given: Sequence[_Named], epsilon: float = 0.0) -> str:
        """Compare the outputs for two microbatches together with those for each of them."""
        rows = [count for _, count in self._seen]
        one, other, whole, again = (_call(copied, named) for named in (*given, given[0]))
        epsilon = epsilon or self._epsilon
        for name, value in one.results.items():
            if name not in again.results or not is_near(value, again.results[name], epsilon):
                return ""  # it is random, or differs between calls
        for name, both in whole.results.items():
            if name not in one.results or name not in other.results:
                return ""
            parts = one.results[name], other.results[name]
            if has_mixed(*parts, both, rows, epsilon, is_last=name.startswith(OUTPUT)):
                what = "output" if name.startswith(OUTPUT) else f"value ({name})"
                return mixing_fault(self._first_of(copied, given, rows, epsilon), what)
        return self._difference_of_added(copied, given, rows, epsilon) if self._keeps else ""

    def _difference_of_added(
        self, copied: nn.Module, given: Sequence[_Named], rows: Sequence[int], epsilon: float
    ) -> str:
        """Compare the losses of layers, which exist only in training, unless they are random."""
        for training in (False, True):
            calls = [_call(copied, named, training=training, gradients=True).added for named in (*given, given[0])]
            number = len(calls[0])
            if not number or not self._kinds.are_known(number, True) or any(len(one) != number for one in calls):
                continue
            for a, b, whole, again, is_sum in zip(*calls, self._kinds.sums(number, True), strict=True):
                if not is_close(a, again, abs(a), epsilon):
                    return ""
                if fault := fault_in_added(a, b, whole, rows, epsilon, is_sum=is_sum):
                    return added_loss_fault(self._title, fault)
            break
        return ""

    def _first_of(self, copied: nn.Module, given: Sequence[_Named], rows: Sequence[int], epsilon: float) -> str:
        """Describe the first layer of the stage that mixes rows."""
        stage = self._title
        calls = [_call(copied, named, records=True).layers for named in given]
        if [name for name, _, _ in calls[0]] != [name for name, _, _ in calls[2]]:
            return f"a layer of {stage}"
        for (name, *one), (_, *other), (_, *whole) in zip(*calls, strict=False):
            for place, values in enumerate(zip(one, other, whole, strict=True)):
                if any(has_mixed(*three, rows, epsilon, is_last=True) for three in zip(*values, strict=False)):
                    return f"layer {name} of {stage}" if place else f"the code before layer {name} of {stage}"
        return f"the end of {stage}"

    @property
    def _epsilon(self) -> float:
        dtypes = {one.dtype for one in self._part.parameters() if one.is_floating_point()}
        if not dtypes:
            leaves = [leaf for named, _ in self._seen for leaf in pytree.tree_leaves(named) if isinstance(leaf, Tensor)]
            dtypes = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
        for device in {"cpu", *(one.device.type for one in self._part.parameters())}:
            if torch.is_autocast_enabled(device):
                dtypes.add(torch.get_autocast_dtype(device))
        return max((epsilon_of(str(one).removeprefix("torch.")) for one in dtypes), default=epsilon_of("float32"))

    @contextmanager
    def _copy(self) -> Iterator[nn.Module]:
        """Yield a copy of the stage; the random states that its calls use are restored."""
        with (
            preserve_random_state(),
            preserve_state(self._part),
            preserve_model(self._part),
        ):  # for objects that a copy shares
            yield copy_of(self._part)

    def _merge_inputs(self, of: Sequence[tuple[_Named, int]], dimension: int, *, shares: bool) -> _Named:
        """Merge a stage's inputs for two microbatches. Raises UsageError if the layout is unknown."""
        (first, some), (second, more) = of
        has_merged = INPUTS in first
        merged: _Named = {}
        if INPUTS in first:
            merged[INPUTS] = _merged_inputs([first[INPUTS], second[INPUTS]], [some, more], self._where)

        def one(leaf: Any, other: Any) -> Any:
            nonlocal has_merged
            if not isinstance(leaf, Tensor):
                return _merged_number(leaf, other, some, more, shares=shares)
            is_equal = leaf.shape == other.shape and torch.equal(leaf, other)
            if shares and is_equal:
                return leaf
            for axis in dict.fromkeys((dimension, 0)):
                if leaf.ndim > axis and (leaf.shape[axis], other.shape[axis]) == (some, more):
                    has_merged = True
                    return torch.cat([leaf, other], axis)
            if is_equal:
                return leaf
            if leaf.ndim and leaf.shape[0] * more == other.shape[0] * some and leaf.shape[0] % some == 0:
                has_merged = True  # rows that were flattened with another dimension
                return _flatten(leaf, other, some, more, is_outer=dimension == 0)
            raise UsageError("it has no rows")

        for name in (name for name in first if name != INPUTS):
            merged[name] = pytree.tree_map(one, first[name], second[name])
        if not has_merged:
            raise UsageError("nothing has rows")
        return merged


def _merged_inputs(parts: Sequence[Any], rows: Sequence[int], where: Any) -> Any:
    if where == 0:
        _check_alike(parts)
        return join_microbatches(parts, rows, what="y")
    if parts[0][1]:
        named = [kwargs for _, kwargs in parts]
        _check_alike(named)
        return (), join_microbatches(named, rows, where, what="y")
    several = [args[0] if len(args) == 1 and not isinstance(where, tuple | list) else args for args, _ in parts]
    _check_alike(several)
    joined = join_microbatches(several, rows, where, what="y")
    return (joined if several[0] is parts[0][0] else (joined,)), {}


def _check_alike(parts: Sequence[Any]) -> None:
    """Raise UsageError for user-cut microbatches that differ in values other than tensors."""
    leaves = [[leaf for leaf in pytree.tree_leaves(one) if not isinstance(leaf, Tensor)] for one in parts]
    if not all(a is b or (isinstance(a, int | float | str) and a == b) for a, b in zip(*leaves, strict=True)):
        raise UsageError("microbatches have individual values")


def _merged_number(one: Any, other: Any, some: int, more: int, *, shares: bool) -> Any:
    if isinstance(one, int) and not isinstance(one, bool) and (one, other) == (some, more) and not shares:
        return some + more
    if one is other or (isinstance(one, int | float | str) and one == other):
        return one
    raise UsageError("it differs between microbatches")


def _flatten(one: Tensor, other: Tensor, some: int, more: int, *, is_outer: bool) -> Tensor:
    if is_outer:
        return torch.cat([one, other])
    cut = [part.reshape(-1, count, *part.shape[1:]) for part, count in ((one, some), (other, more))]
    return torch.cat(cut, 1).flatten(0, 1)


def _call(
    copied: nn.Module, named: _Named, *, training: bool = False, gradients: bool = False, records: bool = False
) -> _StageCall:
    layers: list[tuple[str, list[Array], list[Array]]] = []
    keepers = keepers_in(copied)
    take_each(keepers)
    with ExitStack() as stack:
        if records:
            for name, module in copied.named_modules():
                if name:
                    note = _record_layers(name, layers)
                    stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        stack.enter_context(force_mode(list(copied.modules()), training=training))
        stack.enter_context(torch.set_grad_enabled(gradients))
        results = copied(_copy_inputs(named))
    added = [float(one.detach()) for one in take_each(keepers)]
    tensors = {f"{name} {place}": one for name, value in results.items() for place, one in enumerate(_floats(value))}
    return _StageCall(tensors, added, layers)


def _record_layers(name: str, layers: list[tuple[str, list[Array], list[Array]]]) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        layers.append((name, _floats((args, kwargs)), _floats(result)))

    return note


def _floats(value: Any) -> list[Array]:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.detach().double().cpu().numpy() for leaf in leaves]


def _copy_inputs(named: Mapping[str, Any]) -> _Named:
    """Return copies that require gradients if the values do: otherwise a first layer records no losses.

    Copies may be changed in place, and their graphs are separate from the values, whose memory may belong to messages.
    """

    def copied(one: Tensor) -> Tensor:
        own = one.detach().clone()
        return own.requires_grad_().clone() if one.requires_grad else own

    return pytree.tree_map_only(Tensor, copied, dict(named))  # type: ignore[no-any-return]


def _to_float64(named: _Named) -> _Named:
    return pytree.tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda one: one.double() if one.is_floating_point() else one, named
    )


def _communicates(module: nn.Module) -> bool:
    """Return whether a module, or one in it, calls other ranks, judged by its attributes and functions."""
    if find_communicating_module(module):
        return True
    return any(_names_ranks(inspect.unwrap(type(one).forward)) for one in module.modules())


def _names_ranks(function: Any) -> bool:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None:
        return False
    known = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for cell in closure or ():
        try:
            known.append(cell.cell_contents)
        except ValueError:  # empty
            continue
    return any(_is_of_ranks(one) for one in known)


def _is_of_ranks(value: Any) -> bool:
    if isinstance(value, Communicator):
        return True
    of = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return f"{of}.".startswith(("commlib.", "commlib_torch.", "torch.distributed."))
