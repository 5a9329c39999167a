"""Side streams: work on a stream of its own follows the caller's queued work, and precedes its later work."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from commlib.expert.device_plan import stream_alloc
from commlib.expert.side_stream import SideStream
from tests.late import LATE


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LATE, "delay", 5e-3)


def copied(x: Any) -> Any:
    copy_ = stream_alloc(x, x.shape, x.dtype)
    x.device.copy(copy_, x)
    return copy_


def test_side_work_is_in_order_with_the_caller() -> None:
    side = SideStream(LATE)
    values = np.arange(1000, dtype=np.float32)
    for _ in range(3):
        x = LATE.wrap(LATE.put(values), "x")
        started = side.start(partial(copied, x), x)
        del x
        result = started.wait()
        twice = copied(result)
        del result  # memory of the caller's stream, on which it is read
        np.testing.assert_array_equal(LATE.fetch(twice.owner), values)


def test_results_use_memory_of_the_callers_stream() -> None:
    x, own = LATE.wrap(LATE.put(np.zeros(10, np.float32)), "x"), LATE.current()
    with LATE.using(LATE.stream()):
        assert stream_alloc(x, (3,), np.int32).stream == own
    assert stream_alloc(x, (3,), np.int32).stream == own


def test_a_missing_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this file could never fail."""
    monkeypatch.setattr("commlib.expert.side_stream.SideWork.wait", lambda self: self.value)
    with pytest.raises(AssertionError):
        test_side_work_is_in_order_with_the_caller()
    LATE.synchronise()
