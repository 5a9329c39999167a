"""What the pages import is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/pages").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(
    r"^ *(?:>>> )?((?:from commlib[\w.]* import (?:\([^)]*\)|[^\n]*))|import commlib[\w.]*)", re.MULTILINE
)


def imports(text: str) -> Iterator[str]:
    """Yield the imports from commlib in the Python blocks of a page, as statements of one line."""
    for block in BLOCK.finditer(text):
        for found in IMPORT.finditer(block[2]):
            yield ast.unparse(ast.parse(textwrap.dedent(found[1])))


def failures(statements: dict[str, str]) -> str:
    """Run each statement, in another process; return those that fail. statements: where each one is."""
    code = "import sys\nfor each in sys.stdin.read().splitlines():\n" + textwrap.indent(
        "try: exec(each)\nexcept (ImportError, AttributeError) as error: print(each, error, sep=': ')\n", "    "
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(statements), capture_output=True, text=True, check=True, cwd=ROOT
    )
    return "\n".join(f"{statements[one.split(': ')[0]]}: {one}" for one in done.stdout.splitlines())


@pytest.mark.parametrize("package", ["commlib", "commlib_torch", "commlib_tensorflow"])
def test_names_that_pages_import_are_there(package: str) -> None:
    statements = {
        each: page.relative_to(ROOT).as_posix()
        for page in PAGES
        for each in imports(page.read_text())
        if re.match(rf"(from|import) {package}\b", each)
    }
    assert statements
    assert not failures(statements)


def test_a_name_that_is_not_there_is_found() -> None:
    page = "```python\nfrom commlib.expert.stats import (\n    drawn,\n)\nfrom commlib import init\n```\n"
    found = failures(dict.fromkeys(imports(page), "experts.md"))
    assert found.startswith("experts.md: from commlib.expert.stats import drawn: cannot import name 'drawn'")
    assert len(found.splitlines()) == 1
