"""Position checks: try whether a layer that takes this rank's part of a sequence depends on other ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.tensor_parallel.checks.compare import TOLERANCES
from commlib.world import is_initialized, world

Call = Callable[[Sequence[Array]], Sequence[Array]]
"""A layer: returns its results for these inputs, and the gradients of the inputs if requested."""

_SLACK = 20
"""Factor on the tolerances of `verify`."""


class CommunicatingLayer(UsageError):
    """Raised for a layer that communicates itself: it handles the other parts, so nothing is tried."""


def refuse_move(*args: Any, **options: Any) -> NoReturn:
    """Replace an adapter's `moved` while a layer is tried, because the other ranks do not participate."""
    raise CommunicatingLayer("a layer that communicates between ranks is not tried on parts")


def are_parts(shapes: Sequence[Sequence[int]], dim: int) -> list[bool]:
    """Return which inputs of a layer are sharded along `dim`: those with the same length as the first one."""
    length = shapes[0][dim]
    return [len(shape) > dim and shape[dim] == length for shape in shapes]


def try_positions(calls: Sequence[Call], arrays: Sequence[Array], dim: int) -> str | None:
    """Return None if the results or gradients of a layer on parts differ from those on the joined parts along `dim`.

    Otherwise return the open doubt as text, with {} for the placement of its input; "" if there is none. calls: the
    same layer in the mode of its call, and in others; the first mode in which it draws no random numbers counts. given:
    its inputs; other parts are made of the sharded ones, see `are_parts`. A layer that communicates between ranks
    itself is called equally often on all of them.
    """
    divided = are_parts([one.shape for one in arrays], dim)
    draws = has_answer = False
    for call in calls:
        try:
            before = _calls_between_ranks()
            first = call(arrays)
            if any(group.call_number != count for group, count in before):
                return ""
            again = call(arrays)
        except CommunicatingLayer:
            return ""
        except Exception:  # it cannot be called so
            continue
        if not _are_near(first, again):
            draws = True
            continue
        others = [_make_other_part(arrays, divided, dim, change) for change in (_reorder, _upper_half, _lower_half)]
        results = [_equals_on_parts(call, arrays, other, divided, dim) for other in others]
        if False in results:
            return None
        if has_answer := True in results:
            long = _join(arrays, others[0], divided, dim)
            if any(_equals_on_pieces(call, long, divided, dim, cut) is False for cut in (1, 3)):
                return BY_LENGTH
            break
    return UNTRIED if draws or not has_answer else ""


UNTRIED = (
    "it could not be tried whether it depends on other positions, since it draws random numbers whenever it is called "
    "so, or accepts no other length, and its input is {}. Use a dropout layer for random numbers, and accept any length"
)
BY_LENGTH = (
    "tried on parts of other lengths it depends on other positions, as layers that work in windows do, and its input "
    "is {}. It is right only for lengths like these, and later calls are not checked. Give it the full sequence"
)


def _calls_between_ranks() -> list[tuple[Any, int]]:
    """Return the groups of this process, each with its number of calls so far."""
    return [(group, group.call_number) for group in list(world().runtime.groups)] if is_initialized() else []


def _equals_on_parts(
    call: Call, arrays: Sequence[Array], other: Sequence[Array], divided: Sequence[bool], dim: int
) -> bool | None:
    """Return whether a layer's results on two parts equal those on both joined; None if it cannot be called so."""
    long = _join(arrays, other, divided, dim)
    return _equals_on_pieces(call, long, divided, dim, arrays[0].shape[dim])


def _equals_on_pieces(call: Call, whole: Sequence[Array], divided: Sequence[bool], dim: int, cut: int) -> bool | None:
    """Return whether a layer's results on the pieces before and after a cut equal those on the full inputs."""
    both = list(zip(whole, divided, strict=True))
    ranges = range(cut), range(cut, whole[0].shape[dim])
    pieces = [[one.take(places, dim) if is_part else one for one, is_part in both] for places in ranges]
    try:
        first, second, every = (call(one) for one in (*pieces, whole))
    except Exception:
        return None
    if len({len(first), len(second), len(every)}) > 1:
        return False
    return all(_equals_joined(one, two, all_, dim) for one, two, all_ in zip(first, second, every, strict=True))


def _join(first: Sequence[Array], second: Sequence[Array], divided: Sequence[bool], dim: int) -> list[Array]:
    return [
        np.concatenate([one, two], dim) if is_part else one
        for one, two, is_part in zip(first, second, divided, strict=True)
    ]


def _make_other_part(
    arrays: Sequence[Array], divided: Sequence[bool], dim: int, change: Callable[[Array, int], Array]
) -> list[Array]:
    """Return another part: sharded floats are replaced by others, integers and flags by `change`."""
    parts = []
    for one, is_part in zip(arrays, divided, strict=True):
        if not is_part or one.dtype.kind in "biu":
            parts.append(change(one, dim) if is_part else one)
        else:
            parts.append((np.flip(one, dim) * one.dtype.type(0.5) + one.dtype.type(0.1)).astype(one.dtype))
    return parts


def _reorder(part: Array, dim: int) -> Array:
    """Return the same integers in another order, or other flags."""
    flipped: Array = np.flip(part, dim)
    if part.dtype.kind != "b":
        return flipped
    other: Array = flipped ^ (np.arange(part.size).reshape(part.shape) % 2 == 0)
    return other


def _upper_half(part: Array, dim: int) -> Array:
    """Clamp integers to the upper half of their range."""
    least, most = (part.min(), part.max()) if part.size else (0, 0)
    result: Array = np.maximum(part, part.dtype.type(int(most) - (int(most) - int(least)) // 2))
    return result


def _lower_half(part: Array, dim: int) -> Array:
    """Clamp integers to the lower half of their range."""
    least, most = (part.min(), part.max()) if part.size else (0, 0)
    result: Array = np.minimum(part, part.dtype.type(int(least) + (int(most) - int(least)) // 2))
    return result


def _equals_joined(first: Array, second: Array, whole: Array, dim: int) -> bool:
    """Return whether an array equals two parts joined."""
    if whole.ndim <= dim or first.ndim != whole.ndim or second.ndim != whole.ndim:
        return False
    shapes = {one.shape[:dim] + one.shape[dim + 1 :] for one in (first, second, whole)}
    return len(shapes) == 1 and _is_near(np.concatenate([first, second], dim), whole)


def _are_near(first: Sequence[Array], second: Sequence[Array]) -> bool:
    return len(first) == len(second) and all(map(_is_near, first, second))


def _is_near(own: Array, whole: Array) -> bool:
    if own.shape != whole.shape:
        return False
    if whole.dtype.name not in TOLERANCES:
        return np.array_equal(own, whole)
    allowed = _SLACK * TOLERANCES[whole.dtype.name] * float(np.abs(whole[np.isfinite(whole)]).max(initial=0.0))
    return bool(np.allclose(own.astype(np.float64), whole.astype(np.float64), 0, allowed, equal_nan=True))
