"""File headings name a part and say what it does: one line, no question word, and an end."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = ("commlib", "adapters", "benchmarks", "examples")
COLUMNS = 120
QUESTION = re.compile(r"(What|Which|Who|Whom|Whose|How|Where|Whether|When|Why|Do|Does|Is|Are)\b")
END = re.compile(r"[.:]( \[pure\])?$")  # [pure]: the file does no input or output


def sources() -> list[Path]:
    """Return every Python file that users or benchmarks run."""
    return sorted(path for base in BASES for path in (ROOT / base).rglob("*.py"))


def faults(source: str) -> list[str]:
    """Return what is wrong with the heading of a file. A file without a docstring has no heading to be wrong."""
    tree = ast.parse(source)
    text = ast.get_docstring(tree)
    if text is None:
        return []
    first, *rest = text.split("\n")
    line = source.splitlines()[tree.body[0].lineno - 1]
    wrong = []
    if QUESTION.match(first):
        wrong.append(f"begins with the question word {first.split()[0]!r}: begin with the part and what it does")
    if rest and rest[0]:
        wrong.append("is longer than one line: put the rest behind an empty line")
    if not END.search(first):
        wrong.append("has no full stop or colon at its end")
    if len(line) > COLUMNS:
        wrong.append(f"has {len(line)} columns, expected at most {COLUMNS}")
    return wrong


@pytest.mark.parametrize("base", BASES)
def test_headings(base: str) -> None:
    """Many headings were relative clauses, which a reader had to turn round."""
    files = [path for path in sources() if path.is_relative_to(ROOT / base)]
    assert files, f"{base} has no Python files: it has moved"
    wrong = {str(path.relative_to(ROOT)): found for path in files if (found := faults(path.read_text()))}
    assert not wrong


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("What all verbs ask of their arguments.", "question word 'What'"),
        ("Whether reductions run during backward.", "question word 'Whether'"),
        ("Do all ranks make the same call? Asked before data moves.", "question word 'Do'"),
        ("Pool: lend memory for results,\nand use it again.", "longer than one line"),
        ("Pool: lend memory for results", "no full stop or colon"),
        ("Pool: lend memory for results. [open]", "no full stop or colon"),
        ("Pool: " + "m" * 120 + ".", "columns, expected at most 120"),
    ],
)
def test_a_bad_heading_is_found(heading: str, expected: str) -> None:
    found = faults(f'"""{heading}\n\nMore.\n"""\n')
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize(
    "source",
    [
        '"""Pool: lend memory for results."""\n',
        '"""Tracker: decide when each bucket is reduced. [pure]\n\nMore.\n"""\n',
        '"""Change one line of this script:\n\n    import commlib_torch as hvd\n"""\n',
        '"""Whatever is asked for is made here."""\n',
        "import numpy\n",
    ],
)
def test_a_good_heading_passes(source: str) -> None:
    assert faults(source) == []
