"""Comparison of a sharded model with the unsharded one: name the first value that differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shards import Shard

TOLERANCES = {
    "float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "bfloat16": 5e-2, "float16": 5e-3,
}  # fmt: skip
"""By dtype, relative to the largest element of the full value; values of other dtypes must be equal."""


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """A value on this rank, and the full value that it equals or is a shard of.

    dim: dimension along which it is sharded, one piece on each rank in rank order. shard: the shard, in other cases.
    floor: lower bound of the largest element that differences are relative to: some gradients are zero except for
    rounding, such as the gradient of a bias of keys.
    """

    what: str
    own: Array
    whole: Array
    dim: int | None = None
    shard: Shard | None = None
    floor: float = 0.0


def compare(
    axis: ParallelAxis,
    pairs: list[ComparedPair],
    tolerance: float | None = None,
    *,
    against: str = "the unsharded model's",
) -> None:
    """Raise UsageError on all ranks if a value differs on any rank: names the first one, the difference, and the ranks.

    Collective. Ranks must give the same pairs. tolerance: relative to the largest element of the full value; by default
    from `TOLERANCES`, for the coarsest dtype among the values. against: owner of the full values, for the error.
    """
    if tolerance is None:
        tolerance = max((TOLERANCES.get(pair.own.dtype.name, 0.0) for pair in pairs), default=0.0)
    lengths = [0 if pair.dim is None or pair.dim >= pair.own.ndim else pair.own.shape[pair.dim] for pair in pairs]
    everyone = axis.comm.all_gather_object(lengths)
    if len({len(given) for given in everyone}) > 1:
        raise UsageError(f"verify: ranks ran {[len(given) for given in everyone]} steps: give all ranks the same batch")
    difference: tuple[int, str] | None = None
    for at, pair in enumerate(pairs):
        start = sum(given[at] for given in everyone[: axis.rank])
        text = _describe_difference(pair, start, tolerance)
        if text:
            difference = (at, text)
            break
    answers = axis.comm.all_gather_object(difference)
    first = min((one[0] for one in answers if one is not None), default=None)
    if first is not None:
        ranks = [rank for rank, one in enumerate(answers) if one is not None and one[0] == first]
        text = next(one[1] for one in answers if one is not None and one[0] == first)
        raise UsageError(
            f"verify: {pairs[first].what} differs from {against}, the first of {len(pairs)} in order: "
            f"{text}, on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {axis.size}"
        )


def find_differences(axis: ParallelAxis, pairs: list[ComparedPair], tolerance: float) -> dict[int, str]:
    """Return texts of the pairs that differ on this rank, by index. Collective: all ranks give the same pairs."""
    texts = {
        at: _describe_difference(pair, start, tolerance) for at, (pair, start) in enumerate(_with_offsets(axis, pairs))
    }
    return {at: text for at, text in texts.items() if text}


def _with_offsets(axis: ParallelAxis, pairs: list[ComparedPair]) -> list[tuple[ComparedPair, int]]:
    """Return pairs, each with the offset of this rank's shard in the full value."""
    lengths = [0 if pair.dim is None or pair.dim >= pair.own.ndim else pair.own.shape[pair.dim] for pair in pairs]
    before = axis.comm.all_gather_object(lengths)[: axis.rank]
    return [(pair, sum(sizes[at] for sizes in before)) for at, pair in enumerate(pairs)]


def _describe_difference(pair: ComparedPair, start: int, tolerance: float) -> str:
    """Return by how much a value differs, as text; "" if it does not."""
    whole, own = pair.whole, pair.own
    if pair.shard is not None:
        whole = pair.shard.own(whole)
    elif pair.dim is not None and pair.dim < min(own.ndim, whole.ndim):  # otherwise their shapes differ
        whole = whole[(slice(None),) * pair.dim + (slice(start, start + own.shape[pair.dim]),)]
    return difference(own, whole, tolerance, largest=_largest(pair.whole, pair.floor))


def difference(own: Array, expected: Array, tolerance: float | None = None, *, largest: float | None = None) -> str:
    """Return by how much an array differs from the expected one, as text; "" if it does not.

    tolerance: relative to `largest`, by default the largest expected element; by default from `TOLERANCES`
    for the dtype. NaN equals NaN.
    """
    if own.shape != expected.shape:
        return f"its shape is {list(own.shape)}, expected {list(expected.shape)}"
    if not own.size:
        return ""
    if tolerance is None:
        tolerance = max(TOLERANCES.get(array.dtype.name, 0.0) for array in (own, expected))
    if largest is None:
        largest = _largest(expected)
    limit = tolerance if own.dtype.name in TOLERANCES else 0.0
    kind = np.complex128 if own.dtype.kind == "c" else np.float64
    ours, theirs = own.astype(kind), expected.astype(kind)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(ours - theirs))
    worst = float(np.max(distance)) if not np.isnan(distance).any() else float("nan")
    if worst <= limit * largest:
        return ""
    relative = worst / largest if largest else float("inf")
    return f"by {worst:.3g} at most, {relative:.3g} of its largest element ({largest:.3g}; allowed is {limit:.3g})"


def _largest(whole: Array, floor: float = 0.0) -> float:
    every = np.abs(whole.astype(np.complex128 if whole.dtype.kind == "c" else np.float64))
    return float(np.max(every, initial=floor, where=np.isfinite(every)))
