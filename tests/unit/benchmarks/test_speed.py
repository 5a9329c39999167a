"""The speed tables of README and of the page of performance: each ratio is computed from results files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import pages, speed

FACTS = {"cpu": "Some Xeon", "date": "2026-11-23T04:00:00+00:00"}


def test_tables_match_the_files() -> None:
    written = pages.speed_pages()
    assert {path.name for path in written} == {"README.md", "performance.md"}
    for path, text in written.items():
        assert path.read_text() == text, "run python benchmarks/pages.py"


def test_readme_and_the_page_have_no_other_table_of_ratios() -> None:
    """They had older tables without saved raw figures."""
    for path in pages.speed_pages():
        text = path.read_text()
        outside = text[: text.index(speed.BEGIN)] + text[text.index(speed.END) :]
        rows = [line for line in outside.splitlines() if re.search(r"^\|.*\| *[0-9.]+ *\|", line)]
        assert not rows, f"{path.name}: figures belong in benchmarks/speed.py"


def test_a_ratio_is_the_median_of_the_starts(tmp_path: Path) -> None:
    for start, peer in enumerate((1.0, 3.0, 8.0)):
        record = {"facts": FACTS, "seconds": {"ours": [2.0, 2.0, 2.0], "peer": [peer] * 3}}
        (tmp_path / f"named-{start}.json").write_text(json.dumps(record))
    one = speed.Speed("x", "peer", "named-*", "named", speed.step("peer", "ours"))
    records = speed.load(one, tmp_path)
    assert list(one.ratios(records)) == [0.5, 1.5, 4.0]
    assert speed.ratio_text(one.ratios(records)) == "1.50"
    assert speed.machine(records[0]) == "Intel Xeon, 2026-11-23"
    with pytest.raises(FileNotFoundError, match="no results of 'x'"):
        speed.load(one, tmp_path / "other")


def test_ratios_are_formatted() -> None:
    assert [speed.ratio_text([value]) for value in (0.8, 1.999, 2.71, 94.6, 522.2)] == [
        "0.80",
        "2.00",
        "2.7",
        "95",
        "522",
    ]


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        speed.fill("# Speed", "x")
