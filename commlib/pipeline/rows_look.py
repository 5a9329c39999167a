"""Rows look: hold what two microbatches give together against what each gives: layers may mix the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from commlib.dtypes import Array
from commlib.pipeline.losses import is_close

ADD_REMEDY = (
    "let the layer add a mean over rows, or a sum, each as a loss of its own; or use microbatches=1, or "
    'weigh="rows" to train with the mean of the microbatches\' own'
)


def mixes(where: str, what: str) -> str:
    """Return the fault of what mixes rows. where: the layer, or its stage. what: what comes out otherwise."""
    return (
        f"pipeline: {where} mixes the rows of a batch: two microbatches together give another {what} than each of "
        'them, so that they do not come to what the batch gives: use microbatches=1, or weigh="rows" to train with '
        "microbatches as they are"
    )


def adds_neither(where: str, what: str = "is neither a mean over rows nor a sum") -> str:
    """Return the fault of a loss that a layer adds which is no mean over rows, or no sum."""
    return (
        f"pipeline: a loss that a layer of {where} adds {what}, so those of microbatches do not come to that of the "
        f"batch: {ADD_REMEDY}"
    )


def epsilon_of(dtype: str) -> float:
    """Return how exact floats are."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}.get(dtype, 2.0**-23)


def is_near(one: Array, other: Array, epsilon: float) -> bool:
    """Return whether values are the same but for rounding, of many operations. What is not finite tells nothing."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    bound = max(float(np.abs(other).max(initial=0.0)), float(np.abs(one).max(initial=0.0)))
    if not np.isfinite(bound):
        return True
    return bool(np.abs(one - other).max(initial=0.0) <= bound * epsilon**0.45)


def has_mixed(one: Array, other: Array, whole: Array, rows: Sequence[int], epsilon: float, *, is_last: bool) -> bool:
    """Return whether values of two microbatches, of so many rows each, are not those of both together.

    A value whose shape tells nothing of rows is left alone; but not a statistic of a microbatch's rows, such as their
    mean, that a stage gives to another. is_last: it is given to the loss, which is looked at by itself.
    """
    if not one.ndim == other.ndim == whole.ndim:
        return False
    if one.shape == other.shape == whole.shape:
        return bool(one.ndim) and not is_last and not (is_near(one, whole, epsilon) and is_near(other, whole, epsilon))
    sizes = list(zip(one.shape, other.shape, whole.shape, strict=True))
    changed = [axis for axis, (a, b, both) in enumerate(sizes) if not a == b == both]
    if any(a + b != both for a, b, both in (sizes[axis] for axis in changed)):
        return False
    if len(changed) > 1:  # each row of one microbatch with each of its own only
        return True
    (axis,) = changed
    return not any(is_near(parts, whole, epsilon) for parts in _joined(one, other, rows, axis))


def _joined(one: Array, other: Array, rows: Sequence[int], axis: int) -> Iterator[Array]:
    """Yield two values as one, by each way in which rows may lie among what has been flattened with them."""
    yield np.concatenate([one, other], axis)
    within = one.shape[axis] // max(rows[0], 1)
    if (within * rows[0], within * rows[1]) != (one.shape[axis], other.shape[axis]):
        return
    for before in range(2, within + 1):
        if within % before == 0:
            cut = [
                part.reshape(*part.shape[:axis], before, count, within // before, *part.shape[axis + 1 :])
                for part, count in zip((one, other), rows, strict=True)
            ]
            joined = np.concatenate(cut, axis + 1)
            yield joined.reshape(*one.shape[:axis], -1, *one.shape[axis + 1 :])


def fault_in_added(
    one: float, other: float, whole: float, rows: Sequence[int], epsilon: float, *, is_sum: bool
) -> str | None:
    """Return, in words, how a loss of two microbatches together is neither mean nor sum of theirs; None if it is."""
    expected = one + other if is_sum else (one * rows[0] + other * rows[1]) / sum(rows)
    if is_close(whole, expected, abs(one) + abs(other), epsilon) or not math.isfinite(whole):
        return None
    return f"is no {'sum' if is_sum else 'mean'} over rows: of two microbatches it is {whole:.6g}, not {expected:.6g}"


def kind_of_added(once: float, again: float, twice: float, epsilon: float) -> bool | str | None:
    """Return whether a loss that a layer adds is a sum over rows, and not a mean; "none" if nothing is to be seen yet.

    Given those of some rows, of the same rows again, and of these rows twice in one call. None if it is neither.
    """
    if not once and not twice:
        return "none"
    return is_sum_of_rows(once, twice, abs(once - again), epsilon)


def is_sum_of_rows(once: float, twice: float, noise: float, epsilon: float) -> bool | None:
    """Return whether a loss is a sum over rows, and not a mean, given those of some rows, and of these rows twice.

    noise: by how much it differs from call to call. None if it is neither.
    """
    size = max(abs(once), abs(twice))
    if noise > size * epsilon**0.7:  # it is random: what it is nearer to
        return abs(twice - 2 * once) < abs(twice - once)
    if is_close(twice, once, size, epsilon):
        return False
    return True if is_close(twice, 2 * once, size, epsilon) else None


class AddedKinds:
    """Which of the losses that layers of a stage add are sums, by whether it is training, as far as that is known."""

    def __init__(self) -> None:
        self._known: dict[bool, list[bool | None]] = {}

    def sums(self, number: int, training: bool) -> list[bool]:
        """Return of each of so many losses whether it is a sum; what is not known counts as a mean."""
        known = self._known.get(training, ())
        return [bool(one) for one in known] if len(known) == number else [False] * number

    def are_known(self, number: int, training: bool) -> bool:
        """Return whether anything has been found out about so many losses."""
        return len(self._known.get(training, ())) == number

    def are_unknown(self, values: Sequence[float], training: bool) -> bool:
        """Return whether the kind of any of these losses is still to be found out. One that is 0 tells nothing."""
        known = self._known.get(training)
        if known is None or len(known) != len(values):
            return True
        return None in known and any(value for one, value in zip(known, values, strict=True) if one is None)

    def learn(self, kinds: Sequence[bool | str | None], training: bool) -> None:
        """Keep the kinds that `kind_of_added` has told."""
        self._known[training] = [one is True if one != "none" else None for one in kinds]


def untold(stage: int, why: str) -> str:
    """Return the warning that kinds of losses cannot be told."""
    return (
        f"pipeline: whether the losses that layers of stage {stage} add are means over rows or sums cannot be told "
        f"({why}): they count as means"
    )


def unseen(where: str, error: BaseException) -> str:
    """Return the warning that a stage takes the rows of one microbatch alone. where: the stage."""
    return (
        f"pipeline: {where} takes a microbatch, but not the rows of two ({type(error).__name__}: {str(error)[:200]}), "
        "so nobody has seen whether it makes of each row what it would in the whole batch. Does an input that looks as "
        "if it had rows, because it is as long as the batch, have none? Microbatches get parts of it"
    )
