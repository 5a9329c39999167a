"""Programs in README: they run as described, and print the output shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n(?=# (\w+\.py))(.*?)^```", README, re.MULTILINE | re.DOTALL))
CONSOLE = "".join(re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ mpirun -n (\d+) python (\w+\.py)\n((?:[^$\n].*\n)+)", CONSOLE, re.MULTILINE)


def test_every_program_is_started_once() -> None:
    assert len(PROGRAMS) == 4
    assert sorted(name for _, name, _ in COMMANDS) == sorted(PROGRAMS)
    assert CONSOLE.count("$ ") == len(COMMANDS)


@pytest.mark.parametrize(("ranks", "name", "printed"), COMMANDS, ids=[name for _, name, _ in COMMANDS])
def test_a_program_prints_readmes_output(mpirun, ranks, name, printed):
    done = mpirun(int(ranks), PROGRAMS[name], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(printed.splitlines())
