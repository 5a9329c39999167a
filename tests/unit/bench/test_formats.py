"""Other benchmarks' formats: parsed as programs parse them, and compared with lines that the originals printed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from commlib.bench.formats.base import Heading
from commlib.bench.formats.run_tables import find_format
from commlib.bench.options import BenchOptions, BenchOptionsError, check
from commlib.cli.app import app
from tests.unit.bench import sweeps
from tests.unit.bench.figures import row

# Columns for parsers of nccl-tests: size, count, type, redop, root, then time, algbw, busbw and wrong of both places.
NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]\d+)?)"
NCCL_ROW = re.compile(
    rf"^\s+(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(\d+|N/A)"
    rf"\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(\d+|N/A)\s*$"
)
NCCL_MEAN = re.compile(r"# Avg bus bandwidth\s*:\s*([\d.]+)")
OSU_ROW = re.compile(r"^(\d+)\s+(\d+\.\d+)\s*$")


def heading(verb="all_reduce", **changes):
    facts = {**sweeps.FACTS, "versions": {"commlib": "0.1"}}
    options = {"sizes": (1 << 20, 4 << 20), "iters": 20, "warmup_iters": 5, "is_checked": True}
    return Heading(**{"verb": verb, "facts": facts, "pids": [11, 12, 13, 14], **options, **changes})


# A line that all_reduce_perf printed for 16 GPUs, and its titles without the spaces at their ends.
PRINTED = (
    "   134217728      33554432     float     sum      -1  8776.81   15.29   28.67       0"
    "  8860.42   15.15   28.40       0"
)
TITLES = (
    "#                                                              out-of-place                       in-place",
    "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
    "     time   algbw   busbw  #wrong",
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)",
)


def test_a_line_matches_nccl_tests():
    chosen = find_format("nccl", heading())
    size: Any = {"ranks": 16, "size": 1 << 27, "count": 1 << 25}
    out = row(in_place=False, seconds={"commlib": [8776.81e-6]}, **size)
    within = row(in_place=True, seconds={"commlib": [8860.42e-6]}, **size)
    head, line, foot = chosen.head(), chosen.line(out, within), chosen.foot()
    assert line == [PRINTED]
    assert head[2] == (
        "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1"
        " validation: 1 graph: 0"
    )
    assert tuple(title.rstrip() for title in head[-3:]) == TITLES
    assert re.match(r"#  Rank  0 Group  0 Pid     11 on         n0 device  0 \[0x00\] A <fast> CPU$", head[5])
    assert foot[0] == "# Out of bounds values : 0 OK" and "# Collective test concluded: all_reduce_perf" in foot
    match = NCCL_MEAN.match(foot[1])
    assert match is not None and float(match[1]) == pytest.approx((28.67 + 28.40) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23"), (1234.5e-6, "1234.50"), (0.0123456, "12345.6"), (1.2345, "1234500"), (99.0, "9.9e+07")],
)
def test_large_numbers_fit_their_columns(seconds, text):
    one = row(in_place=False, seconds={"commlib": [seconds]})
    match = NCCL_ROW.match(find_format("nccl", heading()).line(one, row(in_place=True))[0])
    assert match is not None and match[6] == text


def test_names_of_nccl_tests():
    chosen = find_format("nccl", heading("all_to_all"))
    words = chosen.line(row("all_to_all", dtype="float16", op="", root=3, in_place=True, wrong=None))[0].split()
    assert words[2:5] == ["half", "none", "3"] and words[5:9] == ["N/A"] * 4 and words[-1] == "N/A"
    assert "# Collective test starting: alltoall_perf" in chosen.head()
    assert chosen.line(row(op="mean", wrong={"commlib": 7}))[0].split()[3] == "avg"
    assert chosen.foot()[0] == "# Out of bounds values : 7 FAILED"


def test_a_line_matches_osu():
    """These are lines that osu_allreduce 7.5 printed, with its size and time."""
    chosen = find_format("osu", heading())
    assert chosen.head() == ["", "# OSU MPI Allreduce Latency Test v7.5"]
    assert chosen.line(row(size=16384, seconds={"commlib": [349.82e-6]})) == [
        "# Datatype: MPI_FLOAT.",
        "# Size       Avg Latency(us)",
        "16384                 349.82",
    ]
    assert chosen.line(row(size=4, seconds={"commlib": [11.69e-6]})) == ["4                      11.69"]
    assert chosen.line(row(size=4, dtype="int32"))[0] == "# Datatype: MPI_INT."


def test_osu_has_its_sizes_and_titles():
    part = find_format("osu", heading("all_gather"))
    assert part.head()[-1] == "# OSU MPI Allgather Latency Test v7.5"
    match = OSU_ROW.match(part.line(row("all_gather", op=""))[-1])
    assert match is not None and match.groups() == (str(1 << 18), "100.00")  # a part of 1 MiB on 4 ranks
    barrier = find_format("osu", heading("barrier"))
    assert barrier.head()[1:] == ["# OSU MPI Barrier Latency Test v7.5", "# Avg Latency(us)"]
    assert barrier.line(row("barrier", dtype="", op="", size=0)) == ["           100.00"]


def test_a_format_measures_what_it_shows():
    nccl = check(BenchOptions("all_reduce", format="nccl"), 4)
    assert nccl.places == (False, True) and (nccl.iters, nccl.warmup_iters) == (20, 5)
    assert check(BenchOptions("broadcast", format="nccl"), 4).places == (True,)
    assert check(BenchOptions("all_reduce", format="nccl", in_place=True, iters=3), 4).places == (True,)
    assert check(BenchOptions("all_reduce", format="osu"), 4).places == (False,)
    assert check(BenchOptions("broadcast", format="osu"), 4).places == (True,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BenchOptions("all_reduce", format="ocu"), "--format 'ocu' is unknown; known are nccl, osu"),
        (BenchOptions("all_reduce", format="osu", peers=("mpi",)), "--format osu does not support --peer"),
        (BenchOptions("all_reduce", format="nccl", csv=True), "--format nccl does not support --csv"),
        (BenchOptions("send_recv", format="osu"), "--format osu has no ring of send_recv"),
        (BenchOptions("barrier", format="nccl"), "--format nccl has no barrier"),
        (BenchOptions("all_reduce", format="osu", side_by_side=True), "one figure per size"),
    ],
)
def test_options_without_a_place_in_a_format_are_refused(options, message):
    with pytest.raises(BenchOptionsError, match=re.escape(message)):
        check(options, 4)


def test_a_sweep_is_printed_in_both(tmp_path):
    path = tmp_path / "sweep.jsonl"
    sweeps.write(path, plan={"places": ["in", "out"], "nodes": 1})
    done = CliRunner().invoke(app, ["bench", "report", str(path), "--format", "nccl"])
    assert done.exit_code == 0, done.output
    rows = [row_match.groups() for line in done.output.splitlines() if (row_match := NCCL_ROW.match(line))]
    assert [row_match[0] for row_match in rows] == ["4096", "65536", "1048576"] and rows[2][7] == "9.13"
    assert done.output.count("# Avg bus bandwidth") == 1 and "# the format does not support barrier" in done.output
    done = CliRunner().invoke(app, ["bench", "report", str(path), "--format", "osu", "-o", str(tmp_path / "osu.txt")])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "osu.txt").read_text().splitlines()
    read = [match.groups() for match in map(OSU_ROW.match, lines) if match]
    assert read == [("4096", "10.41"), ("65536", "16.55"), ("1048576", "114.86")]
    assert CliRunner().invoke(app, ["bench", "report", str(path), "--format", "ocu"]).exit_code == 2
