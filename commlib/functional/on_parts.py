"""On parts: try whether a layer that takes this rank's part of a sequence looks at what other ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.functional.differences import TOLERANCES

Call = Callable[[Sequence[Array]], Sequence[Array]]
"""A layer: of what it is given, its results, and the gradients of what it was given if these are asked for."""

_SLACK = 20
"""By what the tolerances of `verify` are multiplied."""


class MovesItself(UsageError):
    """A layer that moves values between ranks knows of the other parts: nothing is tried."""


def refuse_move(*args: Any, **options: Any) -> NoReturn:
    """Stand for an adapter's `moved` while a layer is tried: the other ranks do not take part."""
    raise MovesItself("a layer that moves values between ranks is not tried on parts")


def are_parts(shapes: Sequence[Sequence[int]], dim: int) -> list[bool]:
    """Return which tensors that a layer is called with are divided along `dim`: those as long as the first one is."""
    length = shapes[0][dim]
    return [len(shape) > dim and shape[dim] == length for shape in shapes]


def looks_elsewhere(calls: Sequence[Call], given: Sequence[Array], dim: int) -> bool | None:
    """Return whether a layer makes other results, or gradients, of two parts than of both put together along `dim`.

    calls: the same layer in several modes, of which the first counts in which it draws no random numbers. given: what
    it is called with; of what is divided, see `are_parts`, the other part is made. Each is called as often on all
    ranks. None if nobody can tell: it draws some in all, or cannot be called so, as one that takes no other length.
    """
    divided = are_parts([one.shape for one in given], dim)
    other = [_another(one, dim) if is_part else one for one, is_part in zip(given, divided, strict=True)]
    both = [
        np.concatenate([one, two], dim) if is_part else one
        for one, two, is_part in zip(given, other, divided, strict=True)
    ]
    for call in calls:
        try:
            first, second, whole, again = (call(one) for one in (given, other, both, both))
        except MovesItself:
            return False
        except Exception:
            continue
        if all(map(_near, again, whole)):
            parts = zip(first, second, whole, strict=True)
            return not all(_belong(one, two, all_, dim) for one, two, all_ in parts)
    return None


def _another(part: Array, dim: int) -> Array:
    """Return another part: of other floats, or of the same integers in another order."""
    flipped: Array = np.flip(part, dim)
    if part.dtype.kind in "biu":
        return flipped
    another: Array = (flipped * part.dtype.type(0.5) + part.dtype.type(0.1)).astype(part.dtype)
    return another


def _belong(first: Array, second: Array, whole: Array, dim: int) -> bool:
    """Return whether an array is that of two parts put together."""
    if whole.ndim <= dim or first.ndim != whole.ndim or second.ndim != whole.ndim:
        return False
    shapes = {one.shape[:dim] + one.shape[dim + 1 :] for one in (first, second, whole)}
    return len(shapes) == 1 and _near(np.concatenate([first, second], dim), whole)


def _near(own: Array, whole: Array) -> bool:
    if own.shape != whole.shape:
        return False
    if whole.dtype.name not in TOLERANCES:
        return np.array_equal(own, whole)
    allowed = _SLACK * TOLERANCES[whole.dtype.name] * float(np.abs(whole[np.isfinite(whole)]).max(initial=0.0))
    return bool(np.allclose(own.astype(np.float64), whole.astype(np.float64), 0, allowed, equal_nan=True))
