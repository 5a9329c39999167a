"""Matrices of all pairs: the summary of given times, and the options that are accepted."""

from __future__ import annotations

import csv
import json

import pytest

from commlib.bench import pairs
from commlib.bench.options import BenchOptions, BenchOptionsError
from commlib.bench.pairs import Matrix
from commlib.bench.pairs_report import cells, csv_lines, headline, summary, write

SMALL = Matrix(8, {(0, 1): 2e-6, (0, 2): 3e-6, (1, 2): 7e-6})
LARGE = Matrix(1 << 20, {(0, 1): 1e-4, (0, 2): 2e-4, (1, 2): 1e-3})
HOSTS = ["a", "a", "b"]


def test_a_matrix_has_every_pair_twice():
    assert cells(SMALL, 3) == [
        ["rank", "0", "1", "2"],
        ["0", "-", "2.00", "3.00"],
        ["1", "2.00", "-", "7.00"],
        ["2", "3.00", "7.00", "-"],
    ]


def test_small_messages_have_a_latency_and_large_ones_a_bandwidth():
    assert headline(SMALL) == "latency of messages of 8 B, us, half of a round trip"
    assert headline(LARGE) == "bandwidth of messages of 1 MiB, GB/s, half of a round trip"
    assert LARGE.figure((1, 0)) == pytest.approx((1 << 20) / 1e-4 / 1e9)


def test_the_slowest_pair_is_named():
    assert summary(SMALL, HOSTS) == (
        "min 2.00, median 3.00, max 7.00 us; slowest pair: ranks 1 and 2 on a and b, 7.00 us"
    )
    assert summary(LARGE, HOSTS) == (
        "min 1.05, median 5.24, max 10.49 GB/s; slowest pair: ranks 1 and 2 on a and b, 1.05 GB/s"
    )
    assert "ranks 1 and 2 on a," in summary(SMALL, ["a"] * 3)


def test_pair_values_are_computed():
    read = list(csv.DictReader(csv_lines([SMALL, LARGE], HOSTS)))
    assert len(read) == 6
    assert read[2] == {
        "rank": "1",
        "peer": "2",
        "host": "a",
        "peer_host": "b",
        "size_bytes": "8",
        "time_us": "7.000",
        "GBps": "0.0011",
    }


def test_the_file_has_the_matrix(tmp_path):
    write(tmp_path / "pairs.json", [SMALL], {"ranks": 3, "hosts": HOSTS}, {"rounds": 9})
    read = json.loads((tmp_path / "pairs.json").read_text())
    assert read["facts"]["ranks"] == 3 and read["options"] == {"rounds": 9}
    [matrix] = read["matrices"]
    assert matrix["slowest"] == [1, 2] and matrix["pairs"][0] == {"ranks": [0, 1], "seconds": 2e-6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": ("mpi",)}, "pairs has no --peer: leave it out"),
        ({"dtypes": ("int8",)}, "pairs has no --dtype"),
        ({"symmetric": False}, "pairs has no --symmetric, --ordinary"),
        ({"side_by_side": True}, "pairs has no --side-by-side"),
        ({"root": 0}, "pairs has no --root"),
        ({"iters": 0}, "--iters is 0: expected at least 1"),
        ({"rounds": 0}, "--rounds is 0: expected at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(BenchOptionsError, match=message):
        pairs.check(BenchOptions("pairs", **options), 4)


def test_one_rank_has_no_pair():
    with pytest.raises(BenchOptionsError, match="one rank has no pair: start more"):
        pairs.check(BenchOptions("pairs"), 1)
    assert pairs.check(BenchOptions("pairs"), 2) == pairs.DEFAULT_SIZES
    assert pairs.check(BenchOptions("pairs", sizes=(4, 8, 4)), 2) == (4, 8)
