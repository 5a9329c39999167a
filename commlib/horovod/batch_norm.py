"""Batch statistics over all ranks, as if their batches were one, for the synchronised layers of both adapters.

Ranks gather (count, mean, sum of squared deviations) and combine them by the formula of Chan, Golub and LeVeque (1979).
One all-reduce of sums and sums of squares would send less, but a variance that is the difference of two large numbers
loses all its digits if the mean is large against it; and two all-reduces, of the mean and then of the deviations
from it, would wait twice. Statistics are combined in float64.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from commlib.comparison.parameter_check import check_agreement
from commlib.dtypes import Array
from commlib.horovod.broadcast import NamedRanks
from commlib.horovod.operations import start_allgather
from commlib.horovod.process_sets import ProcessSet, global_process_set

# Layer numbers for each process set, in the order of construction, which is the same on all its ranks.
_numbers: weakref.WeakKeyDictionary[ProcessSet, itertools.count[int]] = weakref.WeakKeyDictionary()


def next_layer(process_set: ProcessSet | None) -> int:
    """Return the number of a new layer of a process set; None is all ranks. The layer's operations are named by it."""
    everyone = global_process_set if process_set is None else process_set
    return next(_numbers.setdefault(everyone, itertools.count()))


def compare_layer(name: str, process_set: ProcessSet | None, options: Mapping[str, Any]) -> None:
    """Compare the options of a shared layer among ranks before its first use. Collective, by its name.

    Raises MismatchError on all ranks, with the first option that differs.
    """
    check_agreement(NamedRanks(name, process_set), name, [f"{option}: {value}" for option, value in options.items()])


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Statistics of all ranks' values per channel, in float64, [channels].

    count: the number of values, [1] if all channels have the same number; variance: the biased one. Mean and variance
    are 0 for a channel without values.
    """

    count: Array
    mean: Array
    variance: Array


def gather_statistics(
    mine: Array, channels: int, name: str | None, process_set: ProcessSet | None, device: str = "cpu"
) -> BatchStatistics:
    """Combine this rank's statistics with those of the others. Collective.

    `mine` is one-dimensional: the number of values per channel (one for all channels, or one for each), then the
    means, then the sums of the squared deviations from them. `name` and `device`: see `start_allgather`.
    """
    pending = start_allgather([mine[np.newaxis]], name, process_set=process_set, device=device, blocking=True)
    (everyone,) = pending.wait()
    return combine(everyone, channels)


def combine(everyone: Array, channels: int) -> BatchStatistics:
    """Return the statistics of all values from one row of statistics per rank, laid out as in `gather_statistics`."""
    rows = everyone.astype(np.float64)
    counts, means, squares = np.split(rows, [rows.shape[1] - 2 * channels, rows.shape[1] - channels], axis=1)
    count = counts.sum(0)
    divisor = np.maximum(count, 1)
    mean = (counts * means).sum(0) / divisor
    # Differences from each rank's mean are small, so nothing cancels as it would in E(x^2) - E(x)^2.
    variance = (squares + counts * np.square(means - mean)).sum(0) / divisor
    return BatchStatistics(count, mean, variance)


def check_several(name: str, count: int) -> None:
    """Raise ValueError for a single value, which has no variance. All ranks raise, because all know the count."""
    if count <= 1:
        raise ValueError(
            f"{name}: expected more than 1 value per channel in training, but all ranks together have {count}"
        )


def running_factors(momentum: float | None, batches: SupportsFloat | None, count: int) -> tuple[float, float]:
    """Return (weight of this batch in running statistics, factor that makes its variance of `count` values unbiased).

    --
        `batches` is the number of batches, including this one: without a momentum, running statistics are their plain
        average. `batches` is read only then, because reading it would wait for a GPU.
    """
    if momentum is None:
        assert batches is not None
        momentum = 1.0 / float(batches)
    return momentum, count / (count - 1)
