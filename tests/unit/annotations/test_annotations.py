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
    """What mypy finds."""
    files = names([*RIGHT, *WRONG, *EXAMPLES])
    command = [sys.executable, "-m", "mypy", "--show-error-codes", "--no-error-summary", "--no-pretty", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"(?m)^(\S+?):(\d+): error: .*\[([\w-]+)\]$", done.stdout)
    return {(file, int(line), code) for file, line, code in found}


def marked(path: Path) -> set[Fault]:
    """The expected faults of a script."""
    found = ((number, re.search(r"# error: ([\w-]+)$", line)) for number, line in enumerate(path.open(), 1))
    return {(str(path.relative_to(ROOT)), number, mark[1]) for number, mark in found if mark is not None}


@pytest.mark.parametrize("path", names(RIGHT))
def test_scripts_pass(path: str, faults: set[Fault]) -> None:
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


def test_ignored_faults_are_not_ours() -> None:
    """Examples ignore only what untyped frameworks force on them."""
    found = [line for path in EXAMPLES for line in path.open() if "type: ignore" in line]
    for reason, count in FORCED.items():
        assert sum(reason in line for line in found) == count, reason
    assert len(found) == sum(FORCED.values())
