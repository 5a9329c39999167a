"""Split: decide how many layers each stage has, from what a user says or from the layers' sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from commlib.errors import UsageError
from commlib.pipeline.schedule.balance import balance


def even_counts(sizes: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has so that their sizes, such as bytes of weights, are even.

    A layer without a size costs something, too: as much as a hundredth of an average one. Raises UsageError.
    """
    least = sum(sizes) / len(sizes) / 100 if sum(sizes) else 1.0
    return balance([size + least for size in sizes], stages)


def counts_given(split: Sequence[Any], names: Sequence[str], stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has: as numbers say, or names of those with which later stages begin.

    Raises UsageError if they are no numbers that add up to the layers, or no such names in their order.
    """
    split = list(split)
    if split and all(isinstance(count, int) for count in split):
        if len(split) != stages or min(split) < 1 or sum(split) != len(names):
            raise UsageError(
                f"pipeline: split is {split}; expected {stages} positive numbers that add up to the {len(names)} layers"
            )
        return tuple(split)
    check_names(split, stages)
    if unknown := [name for name in split if name not in names]:
        raise UsageError(f"pipeline: split: there is no layer {unknown[0]!r}; there are {', '.join(names)}")
    return counts_between([names.index(name) for name in split], len(names), split)


def check_names(split: Sequence[Any], stages: int) -> None:
    """Raise UsageError unless there is a name for each stage but the first."""
    if not all(isinstance(name, str) for name in split):
        raise UsageError("pipeline: split: give names of layers, or (of a sequence of them) how many each stage has")
    if len(split) != stages - 1:
        raise UsageError(f"pipeline: split names {len(split)} layers; expected {stages - 1}: one for each later stage")


def counts_between(starts: Sequence[int], count: int, split: Sequence[Any]) -> tuple[int, ...]:
    """Return how many units lie from each start to the next. Raises UsageError if they do not follow each other."""
    counts = tuple(end - start for start, end in pairwise((0, *starts, count)))
    if min(counts) < 1:
        raise UsageError(f"pipeline: split {list(split)}: name layers in the order of their use, not the first one")
    return counts


def unknown_split(split: str) -> UsageError:
    """Return the error for a word that says nothing."""
    return UsageError(f"pipeline: split is {split!r}, expected 'auto', 'time', numbers of layers, or names of layers")
