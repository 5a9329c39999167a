"""Options of `commlib bench`: the number of calls, timing of single calls, both placements."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from commlib.bench.options import BenchOptions, check
from commlib.bench.rows import mistakes
from commlib.bench.session import Session

pytestmark = [pytest.mark.any_ranks, pytest.mark.any_mpi]


def rows(comm, verb, **options):
    session = Session(comm, MPI.COMM_WORLD, check(BenchOptions(verb, sizes=(4000,), rounds=2, **options), comm.size))
    session.probe()
    return list(session.rows())


def test_single_calls_of_every_contender_are_timed_and_shared_by_all_ranks(comm):
    [row] = rows(comm, "all_reduce", peers=("mpi",), iters=7, warmup_iters=1, percentiles=True)
    assert set(row.percentiles) == {"commlib", "mpi"}
    for shares in row.percentiles.values():
        assert 0 < shares["p50"] <= shares["p95"] <= shares["p99"]
    assert comm.all_gather_object(row.percentiles) == [row.percentiles] * comm.size
    assert mistakes([row]) == 0


def test_single_calls_are_timed_only_on_request(comm):
    [row] = rows(comm, "all_gather", iters=3)
    assert row.percentiles == {} and row.in_place is False


def test_the_requested_number_of_calls_is_made(comm):
    session = Session(
        comm, MPI.COMM_WORLD, check(BenchOptions("barrier", rounds=2, iters=5, warmup_iters=3), comm.size)
    )
    number = 0

    def make(case):
        def call():
            nonlocal number
            number += 1
            comm.barrier()

        return call

    session.makers = {"commlib": make}
    list(session.rows())
    assert number == 2 * (5 + 3) + 2  # two checks of the result
