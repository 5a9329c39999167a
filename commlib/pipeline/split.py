"""Split: determine the number of layers in each stage, from an option or from the sizes of the layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from commlib.arguments import suggest
from commlib.errors import UsageError
from commlib.pipeline.schedule.balance import balance


def even_counts(sizes: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the number of layers in each stage for even sizes, such as bytes of weights.

    A layer without a size counts as a hundredth of the average. Raises UsageError.
    """
    least = sum(sizes) / len(sizes) / 100 if sum(sizes) else 1.0
    return balance([size + least for size in sizes], stages)


def read_split(split: Sequence[Any], names: Sequence[str], stages: int) -> tuple[int, ...]:
    """Return the number of layers in each stage, from numbers or from the names of the first layers of later stages.

    Raises UsageError unless they are numbers whose sum is the number of layers, or names of layers in order.
    """
    if not isinstance(split, Iterable):
        raise unknown_split(split)
    split = list(split)
    if split and all(isinstance(count, int) for count in split):
        if len(split) != stages or min(split) < 1 or sum(split) != len(names):
            raise UsageError(
                f"pipeline: split is {split}; expected {stages} positive numbers that add up to the {len(names)} layers"
            )
        return tuple(split)
    check_names(split, stages)
    if unknown := [name for name in split if name not in names]:
        hint = suggest(unknown[0], names)
        raise UsageError(f"pipeline: split: unknown layer {unknown[0]!r}; the layers are {', '.join(names)}{hint}")
    return counts_between([names.index(name) for name in split], len(names), split)


def check_names(split: Sequence[Any], stages: int) -> None:
    """Raise UsageError unless there is a name for each stage except the first."""
    if not all(isinstance(name, str) for name in split):
        raise UsageError(
            "pipeline: split: expected names of layers or, for a sequence of layers, the number in each stage"
        )
    if len(split) != stages - 1:
        raise UsageError(f"pipeline: split names {len(split)} layers; expected {stages - 1}: one for each later stage")


def counts_between(starts: Sequence[int], count: int, split: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of units from each start to the next. Raises UsageError if the starts are not in order."""
    counts = tuple(end - start for start, end in pairwise((0, *starts, count)))
    if min(counts) < 1:
        raise UsageError(f"pipeline: split {list(split)}: name layers in the order of their use, without the first")
    return counts


def unknown_split(split: object) -> UsageError:
    """Return the error for an unknown value of split."""
    return UsageError(f"pipeline: split is {split!r}, expected 'auto', 'time', numbers of layers, or names of layers")
