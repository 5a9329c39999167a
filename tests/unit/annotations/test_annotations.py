"""Users' scripts under `mypy --strict`: those in `right/` and the examples pass, each marked line in `wrong/` fails.

One run of mypy, with the settings and the cache of the project's own run, which fills the cache.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
RIGHT, WRONG = sorted(HERE.glob("right/*.py")), sorted(HERE.glob("wrong/*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

Fault = tuple[str, int, str]
"""A file below the root, a line, and mypy's code."""

pytestmark = pytest.mark.skipif(
    not [*ROOT.glob(".mypy_cache/*/*")], reason="run mypy first: with its cache this takes seconds"
)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.fixture(scope="module")
def faults() -> set[Fault]:
    """Return the faults that mypy reports."""
    files = names([*RIGHT, *WRONG, *EXAMPLES])
    command = [sys.executable, "-m", "mypy", "--show-error-codes", "--no-error-summary", "--no-pretty", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = re.findall(r"(?m)^(\S+?):(\d+): error: .*\[([\w-]+)\]$", done.stdout)
    return {(file, int(line), code) for file, line, code in errors}


def marked(path: Path) -> set[Fault]:
    """Return the expected faults of a script."""
    comments = ((number, re.search(r"# error: ([\w-]+)$", line)) for number, line in enumerate(path.open(), 1))
    return {(str(path.relative_to(ROOT)), number, mark[1]) for number, mark in comments if mark is not None}


@pytest.mark.parametrize("path", names(RIGHT))
def test_users_scripts_pass(path: str, faults: set[Fault]) -> None:
    assert not {fault for fault in faults if fault[0] == path}


@pytest.mark.parametrize("path", names(EXAMPLES))
def test_examples_pass(path: str, faults: set[Fault]) -> None:
    assert not {fault for fault in faults if fault[0] == path}


@pytest.mark.parametrize("path", names(WRONG))
def test_wrong_lines_fail(path: str, faults: set[Fault]) -> None:
    expected = marked(ROOT / path)
    assert len(expected) > 10
    assert {fault for fault in faults if fault[0] == path} == expected


FORCED = {
    "Keras has no types": 3,
    "TensorFlow has no types": 1,
    "two arguments": 1,  # of a forward, as torch.nn.Sequential has one
}


def test_examples_ignore_only_faults_of_untyped_frameworks() -> None:
    """Examples ignore only what untyped frameworks force on them."""
    ignored = [line for path in EXAMPLES for line in path.open() if "type: ignore" in line]
    for reason, count in FORCED.items():
        assert sum(reason in line for line in ignored) == count, reason
    assert len(ignored) == sum(FORCED.values())
