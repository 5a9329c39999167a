"""On parts: try whether a layer that takes this rank's part of a sequence looks at what other ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.tensor_parallel.checks.differences import TOLERANCES
from commlib.world import is_initialized, world

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


def tried(calls: Sequence[Call], given: Sequence[Array], dim: int) -> str | None:
    """Return None if a layer makes other results, or gradients, of parts than of these put together along `dim`.

    Else what nobody could tell of it, in words, with {} for how what it takes lies; "" if that is nothing. calls: the
    same layer in the mode in which it is called, and in others, of which the first counts in which it draws no random
    numbers. given: what it is called with; of what is divided, see `are_parts`, other parts are made. A layer that
    moves values between ranks itself is called as often on all of them.
    """
    divided = are_parts([one.shape for one in given], dim)
    draws = told = False
    for call in calls:
        try:
            before = _calls_between_ranks()
            first = call(given)
            if any(group.call_number != count for group, count in before):
                return ""
            again = call(given)
        except MovesItself:
            return ""
        except Exception:  # it cannot be called so
            continue
        if not _all_near(first, again):
            draws = True
            continue
        others = [_another(given, divided, dim, change) for change in (_changed, _most, _least)]
        found = [_of_parts(call, given, other, divided, dim) for other in others]
        if False in found:
            return None
        if told := True in found:
            long = _joined(given, others[0], divided, dim)
            if any(_of_pieces(call, long, divided, dim, cut) is False for cut in (1, 3)):
                return BY_LENGTH
            break
    return UNTRIED if draws or not told else ""


UNTRIED = (
    "nobody could try whether it looks at other positions, since it draws random numbers whenever it is called so, or "
    "takes no other length, and its input is {}: let a dropout layer of its own draw them, and let it take any length"
)
BY_LENGTH = (
    "tried on parts of other lengths it looks at other positions, as what works in windows does, and its input is {}: "
    "it is right only for lengths like these, of which calls are not looked at again: give it the whole"
)


def _calls_between_ranks() -> list[tuple[Any, int]]:
    """Return the groups of this process, each with how many calls it has made there so far."""
    return [(group, group.call_number) for group in list(world().runtime.groups)] if is_initialized() else []


def _of_parts(
    call: Call, given: Sequence[Array], other: Sequence[Array], divided: Sequence[bool], dim: int
) -> bool | None:
    """Return whether a layer makes of two parts what it makes of both together; None if it cannot be called so."""
    long = _joined(given, other, divided, dim)
    return _of_pieces(call, long, divided, dim, given[0].shape[dim])


def _of_pieces(call: Call, whole: Sequence[Array], divided: Sequence[bool], dim: int, cut: int) -> bool | None:
    """Return whether a layer makes of the pieces before and behind a cut what it makes of all."""
    both = list(zip(whole, divided, strict=True))
    ranges = range(cut), range(cut, whole[0].shape[dim])
    pieces = [[one.take(places, dim) if is_part else one for one, is_part in both] for places in ranges]
    try:
        first, second, every = (call(one) for one in (*pieces, whole))
    except Exception:
        return None
    if len({len(first), len(second), len(every)}) > 1:
        return False
    return all(_belong(one, two, all_, dim) for one, two, all_ in zip(first, second, every, strict=True))


def _joined(first: Sequence[Array], second: Sequence[Array], divided: Sequence[bool], dim: int) -> list[Array]:
    return [
        np.concatenate([one, two], dim) if is_part else one
        for one, two, is_part in zip(first, second, divided, strict=True)
    ]


def _another(
    given: Sequence[Array], divided: Sequence[bool], dim: int, change: Callable[[Array, int], Array]
) -> list[Array]:
    """Return another part of what is divided: of other floats, and of integers and flags that are changed."""
    found = []
    for one, is_part in zip(given, divided, strict=True):
        if not is_part or one.dtype.kind in "biu":
            found.append(change(one, dim) if is_part else one)
        else:
            found.append((np.flip(one, dim) * one.dtype.type(0.5) + one.dtype.type(0.1)).astype(one.dtype))
    return found


def _changed(part: Array, dim: int) -> Array:
    """Return the same integers in another order, or other flags."""
    flipped: Array = np.flip(part, dim)
    if part.dtype.kind != "b":
        return flipped
    other: Array = flipped ^ (np.arange(part.size).reshape(part.shape) % 2 == 0)
    return other


def _most(part: Array, dim: int) -> Array:
    """Return the same integers, but none of the lower half of their range."""
    least, most = (part.min(), part.max()) if part.size else (0, 0)
    found: Array = np.maximum(part, part.dtype.type(int(most) - (int(most) - int(least)) // 2))
    return found


def _least(part: Array, dim: int) -> Array:
    """Return the same integers, but none of the upper half of their range."""
    least, most = (part.min(), part.max()) if part.size else (0, 0)
    found: Array = np.minimum(part, part.dtype.type(int(least) + (int(most) - int(least)) // 2))
    return found


def _belong(first: Array, second: Array, whole: Array, dim: int) -> bool:
    """Return whether an array is that of two parts put together."""
    if whole.ndim <= dim or first.ndim != whole.ndim or second.ndim != whole.ndim:
        return False
    shapes = {one.shape[:dim] + one.shape[dim + 1 :] for one in (first, second, whole)}
    return len(shapes) == 1 and _near(np.concatenate([first, second], dim), whole)


def _all_near(first: Sequence[Array], second: Sequence[Array]) -> bool:
    return len(first) == len(second) and all(map(_near, first, second))


def _near(own: Array, whole: Array) -> bool:
    if own.shape != whole.shape:
        return False
    if whole.dtype.name not in TOLERANCES:
        return np.array_equal(own, whole)
    allowed = _SLACK * TOLERANCES[whole.dtype.name] * float(np.abs(whole[np.isfinite(whole)]).max(initial=0.0))
    return bool(np.allclose(own.astype(np.float64), whole.astype(np.float64), 0, allowed, equal_nan=True))
