"""Process sets are made from ranks: integers, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.horovod import ProcessSet


@pytest.mark.parametrize("ranks", ["ab", [0.5], 3, [None], ["0"]])
def test_what_is_not_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(UsageError, match="ProcessSet: expected global ranks such as"):
        ProcessSet(ranks)


def test_ranks_of_numpy_are_ranks() -> None:
    assert ProcessSet(np.array([2, 0])).ranks == [0, 2]
    assert ProcessSet(range(2)).ranks == [0, 1]
