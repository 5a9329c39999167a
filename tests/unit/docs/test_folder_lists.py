"""The page of folders: every module is on it, with the first line of its docstring."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import folders


def test_the_page_matches_the_modules() -> None:
    assert folders.PAGE.read_text() == folders.page(), "python docs/folders.py writes it"


def test_every_module_is_listed(tmp_path: Path) -> None:
    (tmp_path / "commlib/inner").mkdir(parents=True)
    (tmp_path / "commlib/__init__.py").write_text('"""Core: a | b.\n\nMore."""\n')
    (tmp_path / "commlib/world.py").write_text('"""World: start and end."""\n')
    (tmp_path / "commlib/inner/ring.py").write_text('"""Ring: one algorithm. [pure]"""\n')
    text = folders.page(tmp_path)
    assert "## commlib/\n\nCore: a \\| b.\n\n| module | contents |" in text
    assert "| `world.py` | World: start and end. |" in text
    assert text.index("world.py") < text.index("## commlib/inner/") < text.index("| `ring.py` | Ring: one")


def test_a_module_without_a_docstring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commlib").mkdir()
    (tmp_path / "commlib/world.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"world\.py has no docstring"):
        folders.page(tmp_path)
