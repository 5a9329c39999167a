"""ci/test: its parts, their verdicts, and its last lines. Tools and launchers are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

CI = Path(__file__).parents[3] / "ci"
FOLDERS = ("unit", "mpi", "torch_adapter", "tensorflow_adapter", "launch", "multihost", "slurm", "gpu")
# A file with the folder's name has the output of pytest for that folder; everything else succeeds.
PYTHON = f"""#!/bin/sh
case "$1$2" in
*while_moving.py*|-mci.suites) exec {sys.executable} "$@" ;;
-mpytest)
    for last; do :; done
    cat "said/$(basename "$last")"
    exit $(cat "said/$(basename "$last").code")
esac
"""
MPIEXEC = """#!/bin/sh
shift 2
exec "$@"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a copy of ci/test there, with given pytest output for some folders. Returns (exit code, output)."""
    shutil.copytree(CI, tmp_path / "ci")
    for folder in FOLDERS:
        (tmp_path / "tests" / folder).mkdir(parents=True)
    for venv in ("one", "two"):
        (tmp_path / venv / "bin").mkdir(parents=True)
        stand_ins = {
            "python": PYTHON,
            "mpiexec": MPIEXEC,
            **dict.fromkeys(("ruff", "mypy", "codespell", "mkdocs"), "#!/bin/sh\n"),
        }
        for name, text in stand_ins.items():
            (tmp_path / venv / "bin" / name).write_text(text)
            (tmp_path / venv / "bin" / name).chmod(0o755)
    (tmp_path / "said").mkdir()

    def call(*arguments, **outputs):
        for folder in FOLDERS:
            text, code = outputs.get(folder, ("...\n3 passed in 0.10s\n", 0))
            (tmp_path / "said" / folder).write_text(text)
            (tmp_path / "said" / f"{folder}.code").write_text(str(code))
        environment = {**os.environ, "VENV": str(tmp_path / "one"), "VENV_MPICH": str(tmp_path / "two")}
        with subprocess.Popen(
            [tmp_path / "ci" / "test", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            (tmp_path / "process").write_text(str(job.pid))
            out, err = job.communicate(timeout=120)
        assert err == ""
        return job.returncode, out

    return call


def parts(output):
    """Name and verdict of each part, from the summary."""
    lines = output.split("=== summary")[1].split("\n\n")[0].splitlines()[1:]
    return {line[:40].strip(): line[47:].strip() for line in lines}


ALL_SKIPPED = (
    "ss\n=== short test summary info ===\n"
    "\033[33mSKIPPED\033[0m [2] tests/multihost/conftest.py:21: no emulated hosts here: no tc\n"
    "\033[33m\033[33m2 skipped\033[0m\033[33m in 0.05s\033[0m\033[0m\n"
)


def test_a_green_run_names_skipped_suites_in_its_last_lines(run):
    """Tests on hosts were skipped for months on machines without tc, and the run was green."""
    code, output = run("openmpi", multihost=(ALL_SKIPPED, 0))
    assert code == 0
    assert output.splitlines()[-2:] == [
        "=== not tested at all",
        "openmpi: tests/multihost: no emulated hosts here: no tc",
    ]
    assert parts(output)["openmpi: tests/multihost"] == "SKIPPED: no emulated hosts here: no tc"


def test_single_skipped_tests_are_counted_without_hiding_others(run):
    code, output = run("openmpi", launch=("..s\n2 passed, 1 skipped in 61.05s (0:01:01)\n", 0))
    assert code == 0 and "not tested at all" not in output
    assert parts(output)["openmpi: tests/launch"] == "ok, 1 skipped"
    assert set(parts(output).values()) == {"ok", "ok, 1 skipped"}


def test_a_failure_counts_whatever_follows(run):
    code, output = run(unit=("F\n1 failed, 2 skipped in 0.10s\n", 1))
    assert code == 1
    verdicts = parts(output)
    assert verdicts.pop("tests/unit") == "FAILED" and set(verdicts.values()) == {"ok"}
    assert [name for name in verdicts if "tests/mpi" in name] == [
        *(f"openmpi: tests/mpi on {ranks}" for ranks in (1, 2, 4)),
        "mpich: tests/mpi on 3",
    ]
    assert [name for name in verdicts if "tests/gpu" in name] == ["openmpi: tests/gpu on 2"]


def test_quick_is_style_unit_tests_and_two_ranks(run):
    code, output = run("quick")
    assert code == 0
    assert list(parts(output)) == [
        *("kernels", "ruff check", "ruff format", "mypy", "codespell", "docs", "tests/unit"),
        *("openmpi: two ranks meet", "openmpi: tests/mpi on 2"),
    ]


def test_full_runs_the_verbs_everywhere_and_the_rest_where_useful(run):
    code, output = run("full")
    assert code == 0
    names = list(parts(output))
    for mpi in ("openmpi", "mpich"):
        assert [f"{mpi}: tests/mpi on {ranks}" in names for ranks in (1, 2, 3, 4)] == [True] * 4
        assert [f"{mpi}: tests/torch_adapter on {ranks}" in names for ranks in (1, 2, 3)] == [True] * 3
        assert [f"{mpi}: tests/gpu on {ranks}" in names for ranks in (2, 4)] == [True, mpi == "openmpi"]
        assert any(name.startswith(f"{mpi}: tests/mpi on 2, whose") for name in names) is (mpi == "openmpi")


def test_a_silent_part_is_ended(run, monkeypatch, tmp_path):
    (tmp_path / "one" / "bin" / "mypy").write_text("#!/bin/sh\necho begun\nexec sleep 100\n")
    monkeypatch.setenv("SILENCE", "1")
    code, output = run("quick")
    assert code == 1
    verdicts = parts(output)
    assert verdicts.pop("mypy").startswith("FAILED (printed nothing for 1 s") and set(verdicts.values()) == {"ok"}


def test_two_parts_run_at_a_time_and_are_printed_in_order(run, monkeypatch, tmp_path):
    """Here mypy ends only once the unit tests, which follow it, have begun."""
    mypy, python = (tmp_path / "one" / "bin" / name for name in ("mypy", "python"))
    mypy.write_text("#!/bin/sh\nfor _ in $(seq 300); do [ -e begun ] && echo met && exit; sleep 0.1; done; exit 1\n")
    python.write_text(python.read_text().replace("-mpytest)", "-mpytest)\n    touch begun"))
    code, output = run("quick")
    assert code == 0, output
    assert output.index("=== mypy\nmet") < output.index("=== codespell") < output.index("=== tests/unit\n...")
    (tmp_path / "begun").unlink()
    monkeypatch.setenv("LANES", "1")
    mypy.write_text(mypy.read_text().replace("300", "3"))
    code, output = run("quick")
    assert code == 1 and parts(output)["mypy"] == "FAILED"


def test_the_slowest_parts_are_reported(run, tmp_path):
    (tmp_path / "one" / "bin" / "codespell").write_text("#!/bin/sh\nsleep 2\n")
    _, output = run("quick")
    slowest = output.split("=== slowest parts (s)\n")[1].splitlines()
    assert slowest[0].split()[1] == "codespell" and int(slowest[0].split()[0]) >= 2 and len(slowest) == 5


def test_an_ended_run_leaves_no_process_or_file(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    mypy = tmp_path / "one" / "bin" / "mypy"
    mypy.write_text("#!/bin/sh\necho $$ >begun\nkill $(cat process)\nsleep 100\n")
    code, _ = run("quick")
    assert code != 0
    process = Path(f"/proc/{(tmp_path / 'begun').read_text().strip()}")
    ends_by = time.monotonic() + 20  # a killed process exists until its parent has waited for it
    while process.exists() and time.monotonic() < ends_by:
        time.sleep(0.05)
    assert not process.exists()
    assert not list((tmp_path / "temporary").iterdir())


def test_unknown_words_are_refused(tmp_path):
    done = subprocess.run([CI / "test", "fast"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "got 'fast'" in done.stderr
