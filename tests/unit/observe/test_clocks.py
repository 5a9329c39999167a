"""Clocks of machines are compared by messages, on ranks that are threads and read clocks of their own."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

import pytest

from commlib.observe.clocks import clock_id, compare_clocks, note_clock
from tests.bodies.loopback import run

AHEAD = {0: 0, 1: 5_000_000_000, 2: 5_000_000_000, 3: -77_000_000}  # ns, of each rank's clock
CLOCKS = {0: "a", 1: "b", 2: "b", 3: "c"}


def test_offsets_are_within_their_errors():
    def work(comm):
        return compare_clocks(comm, CLOCKS, now=lambda: monotonic_ns() + AHEAD[comm.rank])

    offsets_ = run(4, work, nodes=[0, 1, 1, 2])
    assert (offsets_[0].offset, offsets_[0].error) == (0, 0) and offsets_[1] == offsets_[2]
    for rank in (1, 3):
        one = offsets_[rank]
        assert one.to == 0 and abs(one.offset + AHEAD[rank]) <= one.error < 50_000_000


def test_ranks_not_taking_part_are_not_waited_for():
    def work(comm):
        if comm.rank != 0:
            return compare_clocks(comm, {1: "a", 2: "b"}, now=lambda: monotonic_ns() + AHEAD[comm.rank]).to
        return None

    assert run(3, work) == [None, 1, 1]


class Noted(list[Any]):
    note_clock = list.append


@pytest.mark.parametrize("clocks", [{0: "a", 1: "a"}, {0: "a", 1: "b"}])
def test_ranks_with_one_clock_send_nothing(clocks):
    def work(comm):
        noted = Noted()
        comm.runtime.recording.start()
        note_clock(noted if comm.rank else None, comm, clocks)
        return len(noted), len(comm.runtime.recording.events())

    expected = clocks[0] != clocks[1]
    (_, sent), (noted, received) = run(2, work)
    assert noted == expected and bool(sent) == bool(received) == expected


def test_this_machines_clock_has_a_name():
    assert clock_id() == clock_id() != ""
