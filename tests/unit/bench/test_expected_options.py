"""Users of nccl-tests and OSU find warm-up, iterations, percentiles, both places side by side, and CSV."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from commlib.bench import measure
from commlib.bench import run as measuring
from commlib.bench.options import BenchOptions, BenchOptionsError, check
from commlib.bench.report import Report
from commlib.bench.rows import CSV_TITLE, csv_lines, percentiles
from commlib.bench.table import BenchTable
from commlib.bench.verbs import VERBS
from commlib.cli import main
from tests.unit.bench.figures import row, settings
from tests.unit.bench.test_measure import World, clock

__all__ = ["clock"]


@pytest.mark.parametrize("line", ["-w 5 -n 20", "-x 5 -i 20", "--warmup_iters 5 --iters 20", "--warmup-iters 5 -n 20"])
def test_options_accept_the_names_of_both_tools(monkeypatch, line):
    seen: list[BenchOptions] = []

    def run(options):
        seen.append(options)
        return True

    monkeypatch.setattr(measuring, "run", run)
    for name in ("PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = ["all_reduce", *line.split(), "-b", "4", "-e", "64", "-f", "2", "--percentiles", "--side-by-side", "--csv"]
    monkeypatch.setattr("sys.argv", ["commlib", "bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    requested = BenchOptions("all_reduce", iters=20, warmup_iters=5, percentiles=True, side_by_side=True, csv=True)
    assert seen == [
        BenchOptions(**{**{n: getattr(requested, n) for n in requested.__slots__}, "sizes": (4, 8, 16, 32, 64)})
    ]


@pytest.mark.parametrize(
    "options, message",
    [
        (BenchOptions("all_reduce", iters=0), "--iters is 0: expected at least 1"),
        (BenchOptions("all_reduce", warmup_iters=-1), "--warmup-iters is -1: expected at least 0"),
        (BenchOptions("gather", side_by_side=True), "gather has no --side-by-side: leave it out"),
        (BenchOptions("broadcast", side_by_side=True), "broadcast has no --side-by-side"),
        (BenchOptions("all_gather", side_by_side=True, in_place=True), "leave out --in-place and --out-of-place"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(BenchOptionsError, match=message):
        check(options, 4)


def test_places_are_parsed():
    assert check(BenchOptions("all_gather", side_by_side=True), 2).places == (False, True)
    assert check(BenchOptions("all_reduce"), 2).places == (True,)


class Ranks(World):
    """One rank and another that takes `other` seconds for each call, also where single calls are compared."""

    def Allreduce(self, mine, slowest, op):
        np.maximum(mine, self.other, out=slowest)


def test_the_requested_number_of_calls_is_made(clock):
    call = clock.call(1e-3)
    burst = measure.burst_of(Ranks(), call, iters=20, warm_up=5)
    assert call.number == 0  # nothing to estimate
    assert burst() == pytest.approx(1e-3)
    assert call.number == 25
    write = clock.call(1)
    measure.burst_of(Ranks(), call, write, iters=3, warm_up=0)()
    assert (call.number, write.number) == (28, 3)


def test_warm_up_can_be_disabled(clock):
    call = clock.call(1e-3)
    measure.burst_of(Ranks(), call, iters=4, warm_up=0)()
    assert call.number == 4


def test_each_single_call_counts_its_slowest_rank(clock):
    single: list[float] = []
    times = iter([0.0] * 2 + [1.0, 3.0, 1.0, 9.0])

    def call():
        clock.now += next(times)

    burst = measure.burst_of(Ranks(other=2.0), call, iters=4, warm_up=2, single=single)
    assert burst() == pytest.approx((2 + 3 + 2 + 9) / 4)
    assert single == [2.0, 3.0, 2.0, 9.0]


def test_percentiles_are_computed():
    assert percentiles([float(n) for n in range(101)]) == {"p50": 50, "p95": 95, "p99": 99}


SHARES = {"commlib": {"p50": 95e-6, "p95": 280e-6, "p99": 299e-6}}


def test_percentiles_have_columns():
    table = BenchTable(VERBS["all_reduce"], (), bound=False, percentiles=True)
    title, line = table.titles()[0].split(), table.line(row(percentiles=SHARES)).split()
    assert title[:9] == ["size", "B", "count", "type", "redop", "time", "us", "min..max", "us"]
    assert title[9:14] == ["p50", "us", "p95", "us", "p99"]
    assert line[4:9] == ["100.00", "90.00..300.00", "95.00", "280.00", "299.00"]


def test_both_places_are_side_by_side_as_in_nccl_tests():
    table = BenchTable(VERBS["all_gather"], ("mpi",), bound=True, places=(False, True))
    above, title = table.titles()
    line = table.line(row("all_gather"), row("all_gather", seconds={"commlib": [50e-6]}))
    assert above.split() == ["out-of-place", "in-place"]
    assert title.split().count("busbw") == 2 and title.split().count("size") == 1
    assert len(line) == len(title) and line.split()[3] == "100.00" and line.split()[11] == "50.00"
    assert title.index("time us") < above.index("out-of-place") < title.rindex("time us") < above.index("in-place")


def test_a_table_is_written_as_csv():
    rows = [
        row(in_place=True, percentiles=SHARES),
        row("broadcast", root=2, op="", wrong=None, bound_seconds=[], seconds={"commlib": [1e-3]}),
        row("barrier", size=0, count=0, dtype="", op="", seconds={"commlib": [1e-6]}),
    ]
    read = list(csv.DictReader([CSV_TITLE, *csv_lines(rows)]))
    assert [one["contender"] for one in read] == ["commlib", "mpi", "commlib", "commlib"]
    ours, mpi, broadcast, barrier = read
    assert (ours["in_place"], ours["size_bytes"], ours["type"], ours["redop"]) == ("1", "1048576", "float32", "sum")
    assert (ours["time_us"], ours["p99_us"], ours["of_bound"], ours["wrong"]) == ("100.000", "299.000", "0.8000", "0")
    assert (ours["min_us"], ours["max_us"], mpi["min_us"]) == ("90.000", "300.000", "200.000")
    assert float(ours["busbw_GBps"]) == pytest.approx(rows[0].busbw(), abs=1e-4)
    assert (mpi["time_us"], mpi["p99_us"], mpi["of_bound"]) == ("250.000", "", "")
    assert (broadcast["root"], broadcast["wrong"], broadcast["in_place"]) == ("2", "", "")
    assert (barrier["algbw_GBps"], barrier["time_us"]) == ("", "1.000")


def test_with_csv_remarks_go_to_standard_error(capsys):
    output = io.StringIO()
    with Report(settings(csv=True), rounds=9, bound=True, console=Console(file=output)) as report:
        report.note("a remark")
        report.row(row())
        report.row(row())
    assert capsys.readouterr().err == "# a remark\n"
    assert [line.split(",")[0] for line in output.getvalue().splitlines()] == ["verb", *["all_reduce"] * 4]
