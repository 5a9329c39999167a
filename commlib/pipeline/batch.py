"""Batch: cut it into microbatches, and say what each counts in the mean over the batch."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from commlib.dtypes import Array

NONE = -1
"""Instead of a digest, or of a number of rows: nothing was given."""


def rows_of(rows: int, microbatches: int) -> list[slice]:
    """Return the rows of each microbatch: as even as can be, the larger ones first, the last ones empty if need be."""
    size, larger = divmod(rows, microbatches)
    ends = [number * size + min(number, larger) for number in range(microbatches + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def shares(counts: Sequence[float]) -> list[float]:
    """Return what each microbatch's mean counts in the mean of all, given how many terms each has."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def shares_in_updates(counts: Sequence[float], every: int) -> list[float]:
    """Return what each microbatch's mean counts in its update: one follows every so many; 0: one follows them all."""
    step = every or len(counts)
    return [share for start in range(0, len(counts), step) for share in shares(counts[start : start + step])]


class Given(NamedTuple):
    """Digests of what a rank was given for a batch: NONE for nothing."""

    x: int = NONE
    y: int = NONE
    sample_weight: int = NONE


def digest(arrays: Iterable[Array]) -> int:
    """Return a number that tells batches apart, by their bits: -0.0 is not 0.0."""
    number = 0
    for array in arrays:
        number = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, number)
    return number


def by_key(value: Any) -> Any:
    """Return a nest with lists for dicts, in the order of their keys: ranks may have filled them in others."""
    if type(value) in (dict, OrderedDict):
        return [by_key(value[key]) for key in sorted(value, key=str)]
    return [by_key(one) for one in value] if type(value) in (list, tuple) else value


def wants_x(first: int, last: int, given: Sequence[Given]) -> bool:
    """Return whether the ranks of the first and the last stage are to compare x, too: the first has no targets."""
    return given[first].y == NONE != given[last].y


def difference(first: int, last: int, given: Sequence[Given]) -> str:
    """Return what is wrong if the ranks of the first and the last stage were given different batches; else "".

    given: by each rank, what it has. Of x the first stage's is used, of the others the last one's: so targets tell
    whether both are of the same rows; see `wants_x`.
    """
    one, other = given[first], given[last]
    differs = {
        "x": NONE not in (one.x, other.x) and one.x != other.x,
        "y": one.y not in (NONE, other.y),
        "sample_weight": one.sample_weight not in (NONE, other.sample_weight),  # the last one's would count
    }
    different = next((name for name, is_so in differs.items() if is_so), "")
    if not different:
        return ""
    return (
        f"pipeline: ranks {first} and {last} were given different {different}, so x and "
        f"{'y' if different == 'x' else different} are not of the same rows: give all ranks the same batches, and "
        f"shuffle with a seed that is the same on all of them; what differs by rounding alone give to rank "
        f"{first if different == 'x' else last} only"
    )
