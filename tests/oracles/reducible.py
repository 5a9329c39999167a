"""All pairs of dtype and operation, as parameters of a test that runs on several numbers of ranks and MPIs.

Kernels differ by pair, the code around them by the accumulator and the width only: so only these pairs run again.
"""

from __future__ import annotations

import pytest

from tests.oracles.oracle import REDUCIBLE

AGAIN = (
    ("float16", "mean"),
    ("bfloat16", "sum"),
    ("float32", "sum"),
    ("float64", "max"),
    ("int8", "mean"),
    ("int64", "prod"),
    ("uint16", "min"),
    ("uint64", "mean"),
    ("bool", "sum"),
    ("complex64", "mean"),
)


def pairs(all_pairs: list[tuple[str, str]] = REDUCIBLE) -> pytest.MarkDecorator:
    """Return the mark that passes a test `dtype` and `op` of each pair."""
    once = (pytest.mark.any_ranks, pytest.mark.any_mpi)
    return pytest.mark.parametrize(
        "dtype, op", [pytest.param(*pair, marks=() if pair in AGAIN else once) for pair in all_pairs]
    )
