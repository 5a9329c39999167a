"""Comparison of a forward with its recomputation: detect a forward that gives other results when a backward repeats it.

The seeds of keras.random are arguments of a forward, so it draws the same numbers each time. A layer may draw other
random numbers, such as numpy's, or read a Python counter. TensorFlow traces a forward once for itself and once for its
backward, so each trace has its own constants, which are compared. Without compilation the results are compared.
"""

from __future__ import annotations

import enum
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib_tensorflow._bridge import to_array

Mark = tuple[str, str, float, float]
"""A result: its name, its dtype, its norm, and a weighted sum of its elements that changes if elements are swapped."""

_ALIKE = {
    "float64": 1e-9,
    "float32": 1e-4,
}  # of the norm; shorter floats are rounded at other points when operations are fused


class RecomputationCheck:
    """Comparison of the forwards of a stage, or of a layer, in training. what: names the stage or layer in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._constants: dict[tuple[Any, ...], list[int]] = {}
        self.marks: Sequence[Mark] = ()
        """The marks of the last forward that was not compiled."""

    def traced(self, given: Mapping[str, tf.Tensor], operations: Sequence[Any]) -> None:
        """Compare the constants of a forward being traced with those of an earlier trace for the same shapes."""
        key = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in given.items())
        floats = [one for one in operations if one.type == "Const" and one.outputs[0].dtype.is_floating]
        constants = sorted(zlib.crc32(one.get_attr("value").SerializeToString()) for one in floats)
        if self._constants.setdefault(key, constants) != constants:
            raise self._error("has different constants")

    def ran(self, results: Mapping[str, tf.Tensor]) -> None:
        """Mark the results of a forward that ran."""
        self.marks = [_mark(name, result) for name, result in results.items()]

    def check(self, before: Sequence[Mark]) -> None:
        """Compare the last forward with an earlier one, given as its marks."""
        for (name, dtype, norm, mark), (_, _, _, other) in zip(before, self.marks, strict=True):
            if abs(mark - other) > _ALIKE.get(dtype, 0.05) * norm:
                raise self._error(f"has a different result {name!r}")

    def _error(self, what: str) -> UsageError:
        return UsageError(
            f"pipeline: the forward of {self._what} {what} when a backward recomputes it: a layer draws random "
            "numbers (of tf.random, numpy or Python) or reads a changing value, such as a counter. Use keras.random "
            "with a keras.random.SeedGenerator and variables that the layer owns, or keep activations: "
            "checkpoint='none', and a schedule that does not split backwards"
        )


def _mark(name: str, result: tf.Tensor) -> Mark:
    if not result.dtype.is_floating:
        return name, "float64", 1.0, 0.0
    values: Array = np.nan_to_num(to_array(tf.cast(result, tf.float64)).reshape(-1))
    weights = np.cos(np.arange(values.size))
    return name, result.dtype.name, float(np.linalg.norm(values)), float(values @ weights)


class Recomputation(enum.Enum):
    """Role of a forward: FIRST if a backward will recompute it, AGAIN if it is that recomputation."""

    NONE = 0
    FIRST = 1
    AGAIN = 2


class _RecomputationState(threading.local):
    is_again = False


_now = _RecomputationState()


@contextmanager
def mark_recomputation() -> Iterator[None]:
    """Mark the forwards called or traced inside as recomputations by a backward."""
    before, _now.is_again = _now.is_again, True
    try:
        yield
    finally:
        _now.is_again = before


def recomputation() -> Recomputation:
    """Return whether the current forward, called or traced, is recomputed: by stages, or by `tf.recompute_grad`.

    TensorFlow has no flag for this, so the call stack is searched.
    """
    if _now.is_again:
        return Recomputation.AGAIN
    kind = Recomputation.NONE
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and kind is not Recomputation.AGAIN:  # a tf.recompute_grad may be nested in another one
        kind = _CALLERS.get(frame.f_code, kind)
        frame = frame.f_back
    return kind


def _callers() -> dict[CodeType, Recomputation]:
    names = {"inner": Recomputation.FIRST, "inner_recompute_grad": Recomputation.AGAIN}
    callers, left = {}, [tf.recompute_grad.__code__]
    while left:
        code = left.pop()
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
        if code.co_name in names:
            callers[code] = names[code.co_name]
    return callers


_CALLERS = _callers()
