"""tests/plugins/again.py: a further run skips exactly the tests that would only repeat a result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

@pytest.mark.any_ranks
def test_any_ranks(): pass

@pytest.mark.any_mpi
def test_any_mpi(): pass

@pytest.mark.parametrize("which", [pytest.param(0, marks=[pytest.mark.any_ranks, pytest.mark.any_mpi]), 1])
def test_each(which): pass
"""
EVERYTHING = {"any_ranks", "any_mpi", "each[0]", "each[1]"}


@pytest.mark.parametrize(
    "again, left_out",
    [
        ("", set()),
        ("ranks", {"any_ranks", "each[0]"}),
        ("mpi", {"any_mpi", "each[0]"}),
        ("ranks,mpi", EVERYTHING - {"each[1]"}),
    ],
)
def test_marked_tests_are_left_out(tmp_path, again, left_out):
    done = collect(tmp_path, f"--again={again}")
    selected = {line.split("::test_")[1] for line in done.stdout.splitlines() if "::" in line}
    assert selected == EVERYTHING - left_out, done.stdout
    assert not left_out or f"({len(left_out)} deselected)" in done.stdout


def test_unknown_words_are_refused(tmp_path):
    done = collect(tmp_path, "--again=rank")
    assert done.returncode == 4 and "--again: expected some of ranks, mpi, got rank" in done.stderr


ADAPTER = """
from tests.plugins.again import leaves_out, mark_adapter

EVERY = {"every_mpi": ("test_verbs.py",), "every_number": ("test_always",)}

def pytest_ignore_collect(collection_path, config):
    return leaves_out(config, collection_path, **EVERY) or None

def pytest_collection_modifyitems(items):
    mark_adapter(items, items[0].path.parent.name if items else "", **EVERY)
"""


@pytest.mark.parametrize(
    "again, selected", [("", {"verbs", "more", "always", "two"}), ("ranks", {"more", "always"}), ("mpi", {"verbs"})]
)
def test_files_of_adapters_are_not_even_imported(tmp_path, again, selected):
    for name, text in {"verbs": "", "more": "@pytest.mark.ranks(min=3)", "always": "", "two": ""}.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{text}\ndef test_{name}(): pass\nprint('{name}!')")
    (tmp_path / "conftest.py").write_text(ADAPTER)
    done = collect(tmp_path, f"--again={again}", "-s")
    assert {line.split("::test_")[1] for line in done.stdout.splitlines() if "::" in line} == selected, done.stdout
    assert {name for name in ("verbs", "more", "always", "two") if f"{name}!" in done.stdout} == selected


def test_a_file_left_out_by_mistake_is_named(tmp_path):
    text = "import pytest\nmost = {'min': 3}\n@pytest.mark.ranks(**most)\ndef test_more(): pass"
    (tmp_path / "test_hidden.py").write_text(text)
    (tmp_path / "conftest.py").write_text(ADAPTER)
    done = collect(tmp_path, "--again=")
    assert done.returncode == 4 and "test_more is for 3 ranks or more: write ranks(min=3) in its file" in done.stderr


def collect(folder, *options):
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  any_ranks\n  any_mpi\n  ranks\n")
    if not list(folder.glob("test_*.py")):
        (folder / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--co",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.plugins.again",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
