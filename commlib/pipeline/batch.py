"""Batch: cut a batch into microbatches, and compute the weight of each in the mean over the batch."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from commlib.dtypes import Array

NONE = -1
"""The digest, or the number of rows, of a missing input."""


def rows_of(rows: int, microbatches: int) -> list[slice]:
    """Return the rows of each microbatch: as even as possible, the larger ones first; the last ones may be empty."""
    size, larger = divmod(rows, microbatches)
    ends = [number * size + min(number, larger) for number in range(microbatches + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def shares(counts: Sequence[float]) -> list[float]:
    """Return the weight of each microbatch's mean in the mean of all, given the number of terms in each."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def shares_in_updates(counts: Sequence[float], every: int) -> list[float]:
    """Return the weight of each microbatch's mean in its update. every: microbatches per update; 0: a single update."""
    step = every or len(counts)
    return [share for start in range(0, len(counts), step) for share in shares(counts[start : start + step])]


class BatchDigests(NamedTuple):
    """Digests of a rank's inputs for a batch: NONE for a missing one."""

    x: int = NONE
    y: int = NONE
    sample_weight: int = NONE


def digest(arrays: Iterable[Array]) -> int:
    """Return a checksum of the arrays' bits: -0.0 differs from 0.0."""
    number = 0
    for array in arrays:
        number = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, number)
    return number


def sort_by_key(value: Any) -> Any:
    """Return a nest with dicts replaced by lists ordered by key, because insertion order may differ between ranks."""
    if type(value) in (dict, OrderedDict):
        return [sort_by_key(value[key]) for key in sorted(value, key=str)]
    return [sort_by_key(one) for one in value] if type(value) in (list, tuple) else value


def wants_x(first: int, last: int, digests: Sequence[BatchDigests]) -> bool:
    """Return whether the ranks of the first and the last stage must compare x, too: the first has no targets."""
    return digests[first].y == NONE != digests[last].y


def difference(first: int, last: int, digests: Sequence[BatchDigests]) -> str:
    """Return the fault if the ranks of the first and the last stage got different batches; else "".

    given: the digests of each rank. The first stage uses its x, the last stage its other inputs. So equal targets on
    both ranks show that the rows are the same; see `wants_x`.
    """
    one, other = digests[first], digests[last]
    differs = {
        "x": NONE not in (one.x, other.x) and one.x != other.x,
        "y": one.y not in (NONE, other.y),
        "sample_weight": one.sample_weight not in (NONE, other.sample_weight),  # the last stage's would be used
    }
    different = next((name for name, is_so in differs.items() if is_so), "")
    if not different:
        return ""
    return (
        f"pipeline: ranks {first} and {last} got different {different}, so x and "
        f"{'y' if different == 'x' else different} are not of the same rows: pass the same batches on all ranks, and "
        f"shuffle with the same seed; if they differ only by rounding, pass them on rank "
        f"{first if different == 'x' else last} only"
    )
