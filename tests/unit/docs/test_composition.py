"""The tables of features that combine: written from docs/composition.py, and each named test exists."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from docs import composition

ROOT = Path(__file__).parents[3]
MODULES = {"PyTorch": "torch", "Keras": "tensorflow"}


def test_the_page_matches_the_table() -> None:
    text = composition.PAGE.read_text()
    assert composition.page(text) == text, "python docs/composition.py writes it"
    with pytest.raises(ValueError, match="has no"):
        composition.page("# Features\n")


def collect(names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("framework", composition.FRAMEWORKS)
def test_named_tests_are_collected(framework: str) -> None:
    if importlib.util.find_spec(MODULES[framework]) is None:
        pytest.skip(f"needs {MODULES[framework]}")
    names = composition.tests(composition.FRAMEWORKS[framework])
    assert len(names) > 20
    done = collect(names)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_test_is_detected() -> None:
    done = collect(["tests/unit/docs/test_composition.py::test_of_nothing"])
    assert done.returncode != 0 and "not found" in done.stdout + done.stderr


def test_a_pair_without_a_test_is_marked() -> None:
    pairs = {("DP", "PP"): composition.Pair("a::b"), ("DP", "TP"): composition.Pair("", "a::c", "no axis")}
    row = composition.matrix(pairs)[2]
    assert row.startswith("| **DP** | works | refused | not tested |")
    assert "| DP x TP |  | no axis (`a::c`) |" in composition.sources(pairs)
    assert "| DP x CP | not tested | |" in composition.sources(pairs)
    with pytest.raises(ValueError, match="expected a test, or a refusal with its reason"):
        composition.Pair("a::b", "a::c")
