"""Row checks: verify that a stage computes for microbatches what it computes for the batch: layers may mix rows.

A loss that a layer adds may be a mean over rows or a sum: the stage runs once with the same rows twice to find out.
Then, in some batches, two microbatches run through it together, and the results are compared with the results of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.pipeline.losses import CheckSchedule
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
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow.pipelines._parts import MASK, StageLayer
from commlib_tensorflow.pipelines._side_effects import prevent_side_effects
from commlib_tensorflow.pipelines._stage_functions import Named, StageFunctions

_Values = tuple[Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor]]
"""Weights and state before a forward, and both after it."""


class RowCheck:
    """Check of a stage's forwards, outside of the batch and without side effects.

    outputs: the names of the model's outputs that it returns. checks: whether mixed rows are a fault. A stage with
    layers that communicate is not checked: other ranks would have to run the check too.
    """

    def __init__(self, stage: int, part: StageLayer, *, outputs: Sequence[str], checks: bool) -> None:
        self._stage, self._part, self._outputs, self._checks = stage, part, outputs, checks
        layers = [layer for layer in part._flatten_layers() if layer is not part]
        self._is_alone = not any(type(layer).__module__.startswith("commlib_tensorflow") for layer in layers)
        self._epsilon = max((epsilon_of(layer.compute_dtype) for layer in layers), default=epsilon_of("float32"))
        self._looks, self._has_compared, self._has_begun, self._has_warned = CheckSchedule(), False, False, False
        self._first: tuple[Named, int] | None = None
        self._kinds = AddedLossKinds()
        self.fault = ""
        """Why microbatches cannot replace the batch; "" if they can, or if that is unknown."""

    def sums(self, added: tf.Tensor, training: bool) -> list[bool]:
        """Return whether each of the losses that layers have added is a sum."""
        return self._kinds.sums(len(added), training)

    def end(self) -> None:
        """End a batch."""
        self._first, self._has_begun = None, False

    def see(
        self, functions: StageFunctions, rows: int, given: Named, values: _Values, added: Any, *, training: bool
    ) -> None:
        """Check a microbatch's forward: its number of rows, its inputs, and the losses that layers added."""
        if not self._is_alone:
            return
        if added is not None and self._kinds.are_unknown(to_array(added).tolist(), training):
            self._learn(functions, rows, given, values, added, training)
        if not self._checks or self.fault:
            return
        if not self._has_begun:
            self._has_begun = True
            if (added is not None and self._looks.is_due(training)) or not self._has_compared:
                self._first = {name: tf.convert_to_tensor(np.array(to_array(one))) for name, one in given.items()}, rows
        elif self._first is not None:
            (first, count), self._first = self._first, None
            together = _concatenate_inputs(first, given, count, rows)
            if together is not None:
                self._has_compared = True
                self._compare(
                    functions, [(first, count), (given, rows), (together, count + rows)], values, added, training
                )

    def _learn(
        self, functions: StageFunctions, rows: int, given: Named, values: _Values, added: Any, training: bool
    ) -> None:
        """Find out which losses are sums. A loss of 0 gives no evidence."""
        why = "its inputs have no rows in their first dimension"
        self._kinds.learn([False] * len(added), training)
        twice = _concatenate_inputs(given, given, rows, rows)
        for mode in (False, True) if training else (False,):
            if twice is None:
                break
            try:
                once, again, double = (
                    self._call(functions, one, values, training=mode, after=after)[1]
                    for one, after in ((given, False), (given, True), (twice, False))
                )
            except Exception as error:
                why = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            if len(once) == len(again) == len(double) == len(added):
                kinds = [kind_of_added(*one, self._epsilon) for one in zip(once, again, double, strict=True)]
                self._kinds.learn(kinds, training)
                if None in kinds and self._checks:
                    self.fault = added_loss_fault(self._where)
                return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(unknown_kind_warning(self._stage, why), stacklevel=2)

    def _compare(
        self, functions: StageFunctions, of: Sequence[tuple[Named, int]], values: _Values, added: Any, training: bool
    ) -> None:
        """Compare two microbatches together with each of them: the stage's results, and the losses its layers add."""
        try:
            halves = [self._call(functions, given, values, training=False, after=False) for given, _ in of]
            again = self._call(functions, of[0][0], values, training=False, after=True)
            losses = [own for _, own in halves]
            if added is not None and len(losses[0]) != len(added):  # some losses exist only in training
                is_fixed = all(new is old for new, old in zip(values[2], (*values[0], *values[1]), strict=True))
                calls = [self._call(functions, given, values, training=True, after=False)[1] for given, _ in of]
                losses = calls if training and is_fixed else []
        except Exception as error:  # a stage that fails here cannot be checked
            remedy = "make it a constant or weight of a layer, or use microbatches=1"
            warnings.warn(f"{unchecked_rows_warning(self._where, error)}: {remedy}", stacklevel=2)
            return
        if not _all_near(halves[0][0], again[0]) or not np.allclose(halves[0][1], again[1], rtol=1e-3, atol=0):
            return  # the stage is random
        (one, first), (other, second), _ = zip(
            [results for results, _ in halves], (rows for _, rows in of), strict=True
        )
        rows = first, second
        for name, whole in halves[2][0].items():
            epsilon = epsilon_of(whole.dtype.name)
            if _is_float(whole) and has_mixed(
                one[name], other[name], whole, rows, epsilon, is_last=name in self._outputs
            ):
                self.fault = mixing_fault(f"a layer of {self._where}", repr(name))
                return
        if added is None or not losses or any(len(own) != len(added) for own in losses):
            return
        for a, b, whole, is_sum in zip(*losses, self.sums(added, training), strict=True):
            if fault := fault_in_added(a, b, whole, rows, self._epsilon, is_sum=is_sum):
                self.fault = added_loss_fault(self._where, fault)
                return

    @property
    def _where(self) -> str:
        return stage_title(self._stage, [layer.name for layer in self._part.calls])

    def _call(
        self, functions: StageFunctions, given: Named, values: _Values, *, training: bool, after: bool
    ) -> tuple[dict[str, Array], Array]:
        """Return the stage's results, and the losses its layers add. after: with the state after the forward."""
        weights, state, now = values
        with prevent_side_effects(self._part.calls, ()):
            state = now[len(weights) :] if after else state
            results, added, _ = functions.call(weights, state, given, training=training)
            arrays = {name: to_array(one) for name, one in results.items() if not name.endswith(MASK)}
            return arrays, np.zeros(0) if added is None else np.array(to_array(added))


def _concatenate_inputs(first: Named, second: Named, rows: int, others: int) -> Named | None:
    """Concatenate the inputs of two microbatches; return None if that is ambiguous."""
    joined: Named = {}
    for name, one in first.items():
        other = second[name]
        if len(one.shape) and (one.shape[0], other.shape[0]) == (rows, others) and one.shape[1:] == other.shape[1:]:
            joined[name] = tf.concat([one, other], 0)
        elif one.shape == other.shape and bool(np.array_equal(to_array(one), to_array(other))):
            joined[name] = other
        else:
            return None
    is_more = any(joined[name].shape != one.shape for name, one in second.items())
    return joined if is_more else None


def _is_float(array: Array) -> bool:
    return bool(array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def _all_near(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return all(
        not _is_float(value) or is_near(value, other[name], epsilon_of(value.dtype.name)) for name, value in one.items()
    )
