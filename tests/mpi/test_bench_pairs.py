"""`commlib bench pairs`: every pair of ranks plays ping-pong, and bytes that return changed are counted."""

from __future__ import annotations

from itertools import combinations

import pytest
from mpi4py import MPI

from commlib.bench import pairs
from commlib.bench.options import BenchOptions

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks, pytest.mark.any_mpi]


def test_every_pair_is_measured_and_all_ranks_get_the_results(comm):
    reports = []
    options = BenchOptions("pairs", sizes=(1, 70_000), rounds=1, iters=2, warmup_iters=0)
    matrices, wrong = pairs.measure(comm, MPI.COMM_WORLD, options, lambda *report: reports.append(report))
    expected = list(combinations(range(comm.size), 2))
    assert [matrix.nbytes for matrix in matrices] == [1, 70_000]
    assert all(list(matrix.seconds) == expected and min(matrix.seconds.values()) > 0 for matrix in matrices)
    assert wrong == 0 and len(reports) == 2 * len(expected)
    assert comm.all_gather_object(matrices) == [matrices] * comm.size


def test_corrupted_bytes_are_counted(comm, monkeypatch):
    class Spoiling:
        """Rank 1 changes one byte of what it sends."""

        rank, size = comm.rank, comm.size

        def send(self, x, peer):
            if comm.rank == 1:
                x = x.copy()
                x[3] ^= 1
            comm.send(x, peer)

        def recv(self, x, peer):
            return comm.recv(x, peer)

    options = BenchOptions("pairs", sizes=(10,), rounds=1, iters=1, warmup_iters=0)
    _, wrong = pairs.measure(Spoiling(), MPI.COMM_WORLD, options, lambda *what: None)
    assert wrong == comm.size - 1  # in pairs with rank 1: to a higher rank it sent, and got back, a changed byte
    _, unchecked = pairs.measure(
        Spoiling(),
        MPI.COMM_WORLD,
        BenchOptions("pairs", sizes=(10,), rounds=1, iters=1, check=False),
        lambda *what: None,
    )
    assert unchecked == 0
