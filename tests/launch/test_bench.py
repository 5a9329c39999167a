"""`commlib bench` from the command line: under mpiexec and alone, with files, with mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.any_mpi

BENCH = ("-m", "commlib", "bench")
QUICK = ("--rounds", "1")


def lines(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_two_ranks_and_the_files(mpirun, tmp_path):
    out = tmp_path / "results" / "today"
    done = mpirun(2, [*BENCH, "all_reduce", "--end", "4K", "--peer", "mpi", "--out", str(out), *QUICK], timeout=120)
    printed = lines(done)
    assert printed[0].startswith("# all_reduce, 2 ranks on ")
    titles = [line for line in printed if "busbw" in line]
    assert len(titles) == 1 and re.search(r"type redop .*time us .*#wrong +mpi us +ratio$", titles[0])
    rows = [line.split() for line in printed if line[:1] == " "][1:]
    assert [row[:4] for row in rows] == [[str(4**n), str(4 ** (n - 1)), "float32", "sum"] for n in range(1, 7)]
    assert {row[9] for row in rows} == {"0"}
    assert all(re.fullmatch(r"[\d.]+\.\.[\d.]+", row[5]) for row in rows)
    assert "# wrong elements: 0" in printed
    assert "\x1b" not in done.stdout  # Open MPI's ranks see a terminal, but this is none
    data, picture = sorted(out.iterdir())
    assert [line for line in printed if line.startswith("# wrote")] == [f"# wrote {data}", f"# wrote {picture}"]
    record = json.loads(data.read_text())
    assert [row["size"] for row in record["rows"]] == [4**n for n in range(1, 7)]
    assert record["facts"]["ranks"] == 2 and len(record["facts"]["hosts"]) == 2 and "MPI" in record["facts"]["mpi"]
    assert record["options"]["peers"] == ["mpi"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("launched", [True, False])
def test_one_process(mpirun, launch_environment, tmp_path, launched):
    arguments = [*BENCH, "broadcast", "--size", "64K", *QUICK]
    if launched:
        done = mpirun(1, arguments)
    else:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=launch_environment, capture_output=True, text=True, timeout=60, check=False
        )
    printed = lines(done)
    assert printed[0].startswith("# broadcast, 1 rank on ")
    assert printed[-2].split()[:4] == ["65536", "16384", "float32", "0"]


def test_a_barrier_has_one_line(mpirun):
    printed = lines(mpirun(3, [*BENCH, "barrier", "--peer", "mpi", *QUICK], timeout=120))
    assert [line.split() for line in printed if "time us" in line] == [
        ["time", "us", "min..max", "us", "mpi", "us", "ratio"]
    ]
    assert len(printed[-2].split()) == 4


WRONG = {
    "an unknown option": (["all_reduce", "--sizes", "4K"], "No such option: --sizes"),
    "an unknown verb": (["all_redcue"], "verb 'all_redcue' is unknown"),
    "a bad size": (["all_reduce", "--end", "4Q"], "size '4Q': expected"),
    "a root that is not there": (["broadcast", "--root", "2"], "--root is 2: expected a rank from 0 to 1"),
    "an unknown algorithm": (["all_gather", "--algorithm", "rnig"], "all_gather has no algorithm 'rnig'; known are"),
    "a folder that cannot be": (["all_reduce", "--out", "/dev/null/x"], "--out /dev/null/x: cannot make this folder"),
}


@pytest.mark.parametrize(
    "case", [*[*WRONG][:2], *(pytest.param(case, marks=pytest.mark.long) for case in [*WRONG][2:])]
)
def test_wrong_usage_is_reported_once_with_exit_code_2(mpirun, case):
    arguments, message = WRONG[case]
    start = time.monotonic()
    done = mpirun(2, [*BENCH, *arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.count("#") == 0
    assert time.monotonic() - start < 30


def test_without_torch_the_missing_extra_is_named(mpirun):
    program = "import sys\nsys.modules['torch'] = None\nimport commlib.cli\ncommlib.cli.main()\n"
    done = mpirun(2, ["-c", program, "bench", "all_reduce", "--peer", "gloo"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("--peer gloo needs PyTorch: install this project with its extra 'torch'") == 1


BROKEN = """
import sys
import commlib
from commlib.bench import commlib_contender

def broken(comm, case, **options):
    def call():
        comm.all_reduce(case.x, out=case.x)
        if comm.rank == 1:
            case.x[0] += 1
    return call

commlib_contender.call = broken
sys.argv = ["commlib", "bench", "all_reduce", "--size", "4K", "--size", "8", "--rounds", "1", *sys.argv[1:]]
from commlib.cli import main
main()
"""


def test_a_wrong_element_is_shown_and_the_exit_code_is_1(mpirun, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    done = mpirun(2, program, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line[:1] == " "][1:]
    assert [row[9] for row in rows] == ["2", "2"]  # one before the bursts, one after
    assert "# wrong elements: 4" in done.stdout
    assert mpirun(2, [str(program), "--no-check"]).returncode == 0  # then no result is called correct


def test_the_all_reduce_benchmark_and_its_comparison(mpirun, launch_environment, tmp_path):
    """Both use the same code; compare.py reads what all_reduce.py writes."""
    from tests.launch.conftest import ROOT

    script = str(ROOT / "benchmarks/all_reduce.py")
    options = ["--sizes", "4", "2000000", "--rounds", "2", "--peers", "mpi", "pieces"]
    done = mpirun(2, [script, *options, "--out", str(tmp_path / "raw.json")])
    title, small, large = lines(done)
    assert title.split()[:4] == ["size", "count", "type", "time"]
    assert small.split()[0] == "4" and small.count("x)") == 1  # one piece is what mpi does
    assert large.split()[0] == "2000000" and large.count("x)") == 2
    record = json.loads((tmp_path / "raw.json").read_text())
    assert record["ranks"] == 2 and set(record["rows"][1]["seconds"]) == {"commlib", "mpi", "pieces"}
    assert [len(times) for times in record["rows"][1]["seconds"].values()] == [2, 2, 2]


def test_the_all_reduce_benchmark_as_in_the_demo(mpirun):
    """Its default peers were those of all devices, and one of them is refused on the host."""
    from tests.launch.conftest import ROOT

    done = mpirun(2, [str(ROOT / "benchmarks/all_reduce.py"), "--quick", "--sizes", "4"])
    title, row = lines(done)
    assert title.split()[9:] == ["mpi", "us", "pieces", "us", "gloo", "us"], title
    assert row.split()[0] == "4", row


# Nobody ran these, and they had broken: pipeline.py drew invalid batches, moe_keras.py used names that had moved.
BENCHMARKS = {
    "pipeline.py --parts peers --rounds 1 --schedules 1f1b": "convolutions 16 x 16",
    "tensor.py --width 64 --heads 2 --tokens 1,16 --rounds 1": "reduced, bytes",
    "tensor_keras.py --rounds 1": "fit, 2 ranks",
    "moe.py --width 32 --kib 1 --tokens 16 --hidden 16 --rounds 1": "meetings",
    "moe_keras.py --width 32 --tokens 16 --hidden 16 --rounds 1": "of it meetings",
}


@pytest.mark.long
@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_of_parallelism_runs(mpirun, command):
    from tests.launch.conftest import ROOT

    script, *options = command.split()
    done = mpirun(2, [str(ROOT / "benchmarks" / script), *options], timeout=240)
    assert BENCHMARKS[command] in done.stdout and done.returncode == 0, done.stdout + done.stderr
