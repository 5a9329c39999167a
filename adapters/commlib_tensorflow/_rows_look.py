"""Rows look: see whether a stage gives of microbatches what it would give of the batch: layers may mix rows.

A loss that a layer adds may be a mean over rows or a sum: that is found out by giving the stage the same rows twice.
Then, in some batches, two microbatches are given to it together, and compared with each of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.pipeline.losses import ADD_REMEDY, Looks, is_close, is_sum_of_rows
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow._functions import Named, StageFunctions
from commlib_tensorflow._parts import MASK, Part
from commlib_tensorflow._untouched import untouched

_Values = tuple[Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor]]
"""Weights and state before a forward, and both after it."""


class RowsLook:
    """Looks at a stage's forwards, beside the batch and without a trace.

    checks: whether what mixes rows is a fault. A stage with layers that communicate is not looked at: other ranks
    would have to do the same.
    """

    def __init__(self, stage: int, part: Part, *, checks: bool) -> None:
        self._stage, self._part, self._checks = stage, part, checks
        layers = [layer for layer in part._flatten_layers() if layer is not part]
        self._is_alone = not any(type(layer).__module__.startswith("commlib_tensorflow") for layer in layers)
        self._epsilon = max((_epsilon(layer.compute_dtype) for layer in layers), default=_epsilon("float32"))
        self._looks, self._has_compared, self._has_begun, self._has_warned = Looks(), False, False, False
        self._first: tuple[Named, int] | None = None
        self._sums: dict[bool, list[bool | None]] = {}  # by whether it is training
        self.fault = ""
        """What is wrong with taking microbatches instead of the batch; "" if nothing is, or nobody can tell."""

    def sums(self, added: tf.Tensor, training: bool) -> list[bool]:
        """Return whether each of the losses that layers have added is a sum."""
        known = self._sums.get(training, ())
        return [bool(one) for one in known] if len(known) == len(added) else [False] * len(added)

    def end(self) -> None:
        """End a batch."""
        self._first, self._has_begun = None, False

    def see(
        self, functions: StageFunctions, rows: int, given: Named, values: _Values, added: Any, *, training: bool
    ) -> None:
        """See a microbatch's forward: how many rows it had, what it was given, and the losses that layers added."""
        if not self._is_alone:
            return
        if added is not None and self._is_unknown(added, training):
            self._learn(functions, rows, given, values, added, training)
        if not self._checks or self.fault:
            return
        if not self._has_begun:
            self._has_begun = True
            if (added is not None and self._looks.is_due(training)) or not self._has_compared:
                self._first = {name: tf.convert_to_tensor(np.array(to_array(one))) for name, one in given.items()}, rows
        elif self._first is not None:
            (first, count), self._first = self._first, None
            together = _together(first, given, count, rows)
            if together is not None:
                self._has_compared = True
                self._compare(
                    functions, [(first, count), (given, rows), (together, count + rows)], values, added, training
                )

    def _is_unknown(self, added: tf.Tensor, training: bool) -> bool:
        known = self._sums.get(training)
        if known is None or len(known) != len(added):
            return True
        return None in known and any(value for one, value in zip(known, to_array(added), strict=True) if one is None)

    def _learn(
        self, functions: StageFunctions, rows: int, given: Named, values: _Values, added: Any, training: bool
    ) -> None:
        """Find out which losses are sums. One that is 0 tells nothing."""
        why = "its inputs have no rows in their first dimension"
        self._sums[training] = [False] * len(added)
        twice = _together(given, given, rows, rows)
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
                found = [self._kind(*one) for one in zip(once, again, double, strict=True)]
                self._sums[training] = [one is True if one != "none" else None for one in found]
                if None in found and self._checks:
                    self.fault = self._said("is neither a mean over rows nor a sum")
                return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"pipeline: whether the losses that layers of stage {self._stage} add are means over rows or sums "
                f"cannot be told ({why}): they count as means",
                stacklevel=2,
            )

    def _kind(self, once: float, again: float, twice: float) -> bool | str | None:
        if not once and not twice:
            return "none"
        return is_sum_of_rows(once, twice, abs(once - again), self._epsilon)

    def _compare(
        self, functions: StageFunctions, of: Sequence[tuple[Named, int]], values: _Values, added: Any, training: bool
    ) -> None:
        """Compare two microbatches together with each of them: what the stage gives, and what its layers add."""
        try:
            made = [self._call(functions, given, values, training=False, after=False) for given, _ in of]
            again = self._call(functions, of[0][0], values, training=False, after=True)
            losses = [own for _, own in made]
            if added is not None and len(losses[0]) != len(added):  # some are of training alone
                is_fixed = all(new is old for new, old in zip(values[2], (*values[0], *values[1]), strict=True))
                calls = [self._call(functions, given, values, training=True, after=False)[1] for given, _ in of]
                losses = calls if training and is_fixed else []
        except Exception:  # what does not run so cannot be looked at
            return
        if not _alike(made[0][0], again[0]) or not np.allclose(made[0][1], again[1], rtol=1e-3, atol=0):
            return  # it is random
        (one, first), (other, second), _ = zip([results for results, _ in made], (rows for _, rows in of), strict=True)
        for name, whole in made[2][0].items():
            parts = [one[name], other[name]]
            sizes = [part.shape[0] if part.ndim else 0 for part in parts]
            is_of_rows = sizes == [first, second] and whole.shape[:1] == (first + second,) and _is_float(whole)
            if is_of_rows and not _near(whole, np.concatenate(parts)):
                self.fault = (
                    f"pipeline: a layer of stage {self._stage} (of {self._names}) mixes the rows of a batch: two "
                    f"microbatches together give another {name!r} than each of them, so that they do not come to what "
                    'the batch gives: use microbatches=1, or weigh="rows" to train with microbatches as they are'
                )
                return
        if added is None or not losses or any(len(own) != len(added) for own in losses):
            return
        for a, b, whole, is_sum in zip(*losses, self.sums(added, training), strict=True):
            expected = a + b if is_sum else (a * first + b * second) / (first + second)
            if not is_close(whole, expected, abs(a) + abs(b), self._epsilon) and np.isfinite(whole):
                kind = "sum" if is_sum else "mean"
                self.fault = self._said(
                    f"is no {kind} over rows: of two microbatches it is {whole:.6g}, not {expected:.6g}"
                )
                return

    @property
    def _names(self) -> str:
        names = [layer.name for layer in self._part.calls]
        return ", ".join([*names[:8], *["..."] * (len(names) > 8)])

    def _said(self, what: str) -> str:
        return (
            f"pipeline: a loss that a layer of stage {self._stage} (of {self._names}) adds {what}, so those of "
            f"microbatches do not come to that of the batch: {ADD_REMEDY}"
        )

    def _call(
        self, functions: StageFunctions, given: Named, values: _Values, *, training: bool, after: bool
    ) -> tuple[dict[str, Array], Array]:
        """Return what the stage gives, and the losses that its layers add. after: with the state after the forward."""
        weights, state, now = values
        with untouched(self._part.calls, ()):
            state = now[len(weights) :] if after else state
            results, added, _ = functions.call(weights, state, given, training=training)
            arrays = {name: to_array(one) for name, one in results.items() if not name.endswith(MASK)}
            return arrays, np.zeros(0) if added is None else np.array(to_array(added))


def _together(first: Named, second: Named, rows: int, others: int) -> Named | None:
    """Return what two microbatches were given as one; None if that cannot be known."""
    found: Named = {}
    for name, one in first.items():
        other = second[name]
        if len(one.shape) and (one.shape[0], other.shape[0]) == (rows, others) and one.shape[1:] == other.shape[1:]:
            found[name] = tf.concat([one, other], 0)
        elif one.shape == other.shape and bool(np.array_equal(to_array(one), to_array(other))):
            found[name] = other
        else:
            return None
    is_more = any(found[name].shape != one.shape for name, one in second.items())
    return found if is_more else None


def _epsilon(dtype: str) -> float:
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}.get(dtype, 2.0**-23)


def _is_float(array: Array) -> bool:
    return bool(array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def _near(one: Array, other: Array) -> bool:
    """Return whether values are the same but for rounding, of many operations. What is not finite tells nothing."""
    epsilon = _epsilon(one.dtype.name)
    one, other = one.astype(np.float64), other.astype(np.float64)
    bound = max(float(np.abs(other).max(initial=0.0)), float(np.abs(one).max(initial=0.0)))
    if not np.isfinite(bound):
        return True
    return bool(np.abs(one - other).max(initial=0.0) <= bound * epsilon**0.45)


def _alike(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return all(not _is_float(value) or _near(value, other[name]) for name, value in one.items())
