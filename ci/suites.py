"""Suites: run the rows of `matrix` under the MPIs of the environments that `ci/test` has set up.

    python -m ci.suites EXTENT TOOLS MPI=VENV...    # in the root; TOOLS is the virtual environment with ruff and mypy

COVERAGE=1 reports the lines of each package that ran, too; compiled code is not traced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ci import matrix
from ci.parts import Lanes, Part, summary

ROOT = Path(__file__).parents[1]


def environment(venv: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a part: python and mpiexec come from a virtual environment."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Two parts share the cores, so a rank that waits in Open MPI gives its core away. With bytecode, hundreds of
    # processes need not compile the sources again.
    return {**variables, "OMPI_MCA_mpi_yield_when_idle": "1", **more, "PATH": f"{venv}/bin:{os.environ['PATH']}"}


def pytest(suite: matrix.Suite, launcher: Sequence[str], always: Sequence[str]) -> list[str]:
    """Return the command of a suite. A missing folder is an error, and a folder without a test, too."""
    # The ranks would write the same cache at once. Output is lines that end, because launchers pass on lines.
    color = "yes" if sys.stdout.isatty() else "no"
    plugins = [f"-ptests.plugins.{name}" for name in ("moving", "again", "variants")]
    options = ["-q", "-rfEs", f"--color={color}", "--durations=15", "--durations-min=1", "-pno:cacheprovider", *plugins]
    return [*launcher, "python", "-m", "pytest", *options, *always, *suite.pytest(), f"tests/{suite.folder}"]


def parts(
    extent: str, tools: str, venvs: Mapping[str, str], folder: Path, more: Mapping[str, str]
) -> Iterator[tuple[Part, bool]]:
    """Yield the parts of a run in order, and whether nothing may run at the same time."""
    always = [] if extent == matrix.FULL else ["-m", "not long"]
    if more:  # an alarm within coverage.py leaves its lock taken, and the process hangs
        always += ["-k", "not at_any"]
    count = 0

    def part(name: str, command: Sequence[str], venv: str) -> Part:
        nonlocal count
        count += 1
        return Part(name, command, environment(venv, more), folder / f"{count}.log")

    for check in matrix.CHECKS:
        yield part(check.name, check.command, tools), check.is_alone
    for name, suite, launcher in matrix.suites(extent, matrix.NONE):
        yield part(name, pytest(suite, launcher, always), tools), False
    for number, (mpi, venv) in enumerate(venvs.items()):
        if extent == matrix.QUICK and number:
            break
        check = matrix.two_ranks(mpi)
        yield part(f"{mpi}: {check.name}", check.command, venv), False
        for name, suite, launcher in matrix.suites(extent, matrix.OTHER if number else matrix.FIRST):
            yield part(f"{mpi}: {name}", pytest(suite, launcher, always), venv), False
        for check in matrix.soaks(extent) if extent != matrix.QUICK else ():
            yield part(f"{mpi}: {check.name}", check.command, venv), False


def remove_shared_memory(since: float) -> None:
    """Remove what aborted jobs of this run left in shared memory, megabytes each (MPICH), unless a process maps it."""
    files = [*Path("/dev/shm").glob("mpich_shm_*"), *Path("/dev/shm").glob("sm_segment.*")]
    for file in files:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            status = file.stat()
            if status.st_uid == os.getuid() and status.st_mtime > since and not any(_maps(file.name)):
                file.unlink()


def _maps(name: str) -> Iterator[bool]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield name in maps.read_text()


def coverage_environment(venv: str, folder: Path) -> dict[str, str]:
    """Return variables by which each Python process records its lines; one that a signal or MPI_Abort ends does not."""
    # Not in every environment: numba imports coverage where it is, which is 7 % of a rank's start.
    python = f"{venv}/bin/python"
    if subprocess.run([python, "-c", "import coverage"], capture_output=True, check=False).returncode:
        install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "coverage>=7.10"]
        subprocess.run([python, *install], check=True)
    (folder / "coverage").mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT / "ci/traced"), os.environ.get("PYTHONPATH")]))
    data = str(folder / "coverage/data")
    return {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"), "COVERAGE_FILE": data, "PYTHONPATH": path}


def report_coverage(venv: str, more: Mapping[str, str]) -> None:
    """Print the lines of each package that some process has run, and leave `.coverage` for `coverage html`."""
    settings = {**environment(venv, more), "COVERAGE_PROCESS_START": ""}
    command = ["python", "-m", "coverage"]
    subprocess.run([*command, "combine", "-q"], env=settings, check=True)
    shutil.copy(more["COVERAGE_FILE"], ROOT / ".coverage")
    print("\n=== coverage: lines, missing, share")
    packages = [
        str(path.parent) for where in ("commlib/*", "adapters/*") for path in Path().glob(f"{where}/__init__.py")
    ]
    for package in ("commlib", *sorted(packages)):
        report = [*command, "report", f"--include={package}/*"]
        lines = subprocess.run(report, env=settings, capture_output=True, text=True, check=False).stdout.splitlines()
        print(f"{package:<32} {lines[-1].removeprefix('TOTAL').strip() if lines else ''}")


def main(extent: str, tools: str, pairs: Iterable[str]) -> int:
    """Run everything, whatever fails. Return 1 if any part failed."""
    began, started = time.monotonic(), time.time()
    venvs = dict(pair.split("=", 1) for pair in pairs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        more = coverage_environment(tools, folder) if os.environ.get("COVERAGE") else {}
        every = list(parts(extent, tools, venvs, folder, more))
        alone, others = [one for one, is_alone in every if is_alone], [one for one, is_alone in every if not is_alone]
        for some, lanes in ((alone, 1), (others, int(os.environ.get("LANES", "2")))):
            Lanes(lanes).run(some)
        remove_shared_memory(started)
        if more:
            report_coverage(tools, more)
        ran = [one for one, _ in every]
        print(summary(ran, time.monotonic() - began), flush=True)
        return int(any(one.code for one in ran))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
