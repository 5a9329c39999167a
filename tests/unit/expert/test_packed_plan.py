"""A device's plan packed into one array can be unpacked unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.expert.device_plan import DeviceDispatchPlan, pack_device_plan, unpack_device_plan
from tests.late import LATE


@pytest.mark.parametrize("lengths", [(3, 4, 5, 6, 7, 8), (0, 1, 0, 2, 0, 1), (0, 0, 0, 0, 0, 1)])
def test_a_packed_passage_is_unchanged(monkeypatch: pytest.MonkeyPatch, lengths: Any) -> None:
    monkeypatch.setattr(LATE, "delay", 5e-3)
    values = [np.arange(length, dtype=np.int32) + 100 * number for number, length in enumerate(lengths)]
    sent, received, returned, positions, members, starts = (LATE.wrap(LATE.put(each), "a test") for each in values)
    plan = DeviceDispatchPlan(sent, received, returned, positions, members, starts, [1, 2, 3], [4, 5, 6])
    block = pack_device_plan(plan)
    del plan, sent, received, returned, positions, members, starts
    again = unpack_device_plan(block, 3, lambda: None)
    assert (again.sends, again.takes) == ([1, 2, 3], [4, 5, 6])
    got = [again.sent, again.received, again.returned, again.positions, again.members, again.starts]
    for array, expected in zip(got, values, strict=True):
        there = LATE.at(array.address, array.shape, array.dtype, array.owner)
        np.testing.assert_array_equal(LATE.fetch(there), expected)
