"""Row checks: compare the results of two microbatches together with separate ones, to find layers that mix rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from commlib.dtypes import Array
from commlib.pipeline.losses import is_close

ADD_REMEDY = (
    "let the layer add a mean over rows, or a sum, each as a separate loss; or use microbatches=1, or "
    'weigh="rows" to train with the mean of the microbatches\' losses'
)


def stage_title(stage: int, layers: Sequence[str]) -> str:
    """Return the name of a stage in errors, with its first layers."""
    return f"stage {stage} (of {', '.join([*layers[:8], *['...'] * (len(layers) > 8)])})"


def mixing_fault(where: str, what: str) -> str:
    """Return the fault of a layer that mixes rows. where: the layer, or its stage. what: the value that differs."""
    return (
        f"pipeline: {where} mixes the rows of a batch: two microbatches together give another {what} than "
        'separately, so microbatches do not yield the results of the batch: use microbatches=1, or weigh="rows" to '
        "accept the difference"
    )


def added_loss_fault(where: str, what: str = "is neither a mean over rows nor a sum") -> str:
    """Return the fault of a loss added by a layer that is neither a mean over rows nor a sum."""
    return (
        f"pipeline: a loss added by a layer of {where} {what}, so the losses of microbatches do not yield the "
        f"batch's: {ADD_REMEDY}"
    )


def epsilon_of(dtype: str) -> float:
    """Return the relative precision of a float dtype."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}.get(dtype, 2.0**-23)


def is_near(one: Array, other: Array, epsilon: float) -> bool:
    """Return whether values are equal within the rounding errors of many operations. Non-finite values pass."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    bound = max(float(np.abs(other).max(initial=0.0)), float(np.abs(one).max(initial=0.0)))
    if not np.isfinite(bound):
        return True
    return bool(np.abs(one - other).max(initial=0.0) <= bound * epsilon**0.45)


def has_mixed(one: Array, other: Array, whole: Array, rows: Sequence[int], epsilon: float, *, is_last: bool) -> bool:
    """Return whether the values of two microbatches, of `rows` rows each, differ from the values of both together.

    A value whose shape does not depend on rows is ignored; but not a statistic of a microbatch's rows, such as their
    mean, that a stage sends to another. is_last: the value goes to the loss, which is checked separately.
    """
    if not one.ndim == other.ndim == whole.ndim:
        return False
    if one.shape == other.shape == whole.shape:
        return bool(one.ndim) and not is_last and not (is_near(one, whole, epsilon) and is_near(other, whole, epsilon))
    sizes = list(zip(one.shape, other.shape, whole.shape, strict=True))
    changed = [axis for axis, (a, b, both) in enumerate(sizes) if not a == b == both]
    if any(a + b != both for a, b, both in (sizes[axis] for axis in changed)):
        return False
    if len(changed) > 1:  # pairs of rows within one microbatch only
        return True
    (axis,) = changed
    return not any(is_near(parts, whole, epsilon) for parts in _join(one, other, rows, axis))


def _join(one: Array, other: Array, rows: Sequence[int], axis: int) -> Iterator[Array]:
    """Yield two values as one, for each possible position of the rows in a flattened dimension."""
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
    """Return how an added loss of two microbatches together is not the mean or sum of theirs; None if it is."""
    expected = one + other if is_sum else (one * rows[0] + other * rows[1]) / sum(rows)
    if is_close(whole, expected, abs(one) + abs(other), epsilon) or not math.isfinite(whole):
        return None
    return (
        f"is not a {'sum' if is_sum else 'mean'} over rows: for two microbatches it is {whole:.6g}, not {expected:.6g}"
    )


def kind_of_added(once: float, again: float, twice: float, epsilon: float) -> bool | str | None:
    """Return whether an added loss is a sum over rows (True) or a mean (False); None if neither; "none" if it is 0.

    once, again, twice: the loss for some rows, for the same rows again, and for these rows twice in one call.
    """
    if not once and not twice:
        return "none"
    return is_sum_of_rows(once, twice, abs(once - again), epsilon)


def is_sum_of_rows(once: float, twice: float, noise: float, epsilon: float) -> bool | None:
    """Return whether a loss is a sum over rows (True) or a mean (False); None if it is neither.

    once, twice: the loss for some rows, and for these rows twice in one call. noise: its difference between equal
    calls.
    """
    size = max(abs(once), abs(twice))
    if noise > size * epsilon**0.7:  # it is random: take the closer one
        return abs(twice - 2 * once) < abs(twice - once)
    if is_close(twice, once, size, epsilon):
        return False
    return True if is_close(twice, 2 * once, size, epsilon) else None


class AddedLossKinds:
    """The known kinds (sum or mean) of the losses that layers of a stage add, separate for training and inference."""

    def __init__(self) -> None:
        self._flags: dict[bool, list[bool | None]] = {}

    def sums(self, number: int, training: bool) -> list[bool]:
        """Return for each of `number` losses whether it is a sum; unknown ones count as means."""
        flags = self._flags.get(training, ())
        return [bool(one) for one in flags] if len(flags) == number else [False] * number

    def are_known(self, number: int, training: bool) -> bool:
        """Return whether the kinds of `number` losses have been recorded."""
        return len(self._flags.get(training, ())) == number

    def are_unknown(self, values: Sequence[float], training: bool) -> bool:
        """Return whether the kind of any of these losses is still unknown. A loss of 0 does not reveal its kind."""
        flags = self._flags.get(training)
        if flags is None or len(flags) != len(values):
            return True
        return None in flags and any(value for one, value in zip(flags, values, strict=True) if one is None)

    def learn(self, kinds: Sequence[bool | str | None], training: bool) -> None:
        """Record the kinds that `kind_of_added` returned."""
        self._flags[training] = [one is True if one != "none" else None for one in kinds]


def unknown_kind_warning(stage: int, why: str) -> str:
    """Return the warning that the kinds of losses cannot be determined."""
    return (
        f"pipeline: cannot determine whether the losses that layers of stage {stage} add are means over rows or sums "
        f"({why}): they count as means"
    )


def unchecked_rows_warning(where: str, error: BaseException) -> str:
    """Return the warning that a stage accepts only the rows of one microbatch. where: the stage."""
    return (
        f"pipeline: {where} accepts one microbatch, but not two together ({type(error).__name__}: {str(error)[:200]}), "
        "so whether it mixes the rows of a batch is unknown. Does an input without rows have the length of the batch? "
        "Microbatches get parts of it"
    )
