"""Write docs/pages/folders.md: every module of commlib and its adapters, with the first line of its docstring.

python docs/folders.py             # after a module was added, renamed, or has another heading; a unit test compares
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/pages/folders.md"
PACKAGES = ("commlib", "adapters/commlib_torch", "adapters/commlib_tensorflow")
HEAD = """# Folders

Every module, by folder, with the first line of its docstring; `[pure]` marks modules without input or output.
[Architecture](../../ARCHITECTURE.md) draws the layers and defines which may import which.
`python docs/folders.py` writes this page.
"""


def folders(root: Path = ROOT) -> Iterator[Path]:
    """Yield every folder that has Python modules, each before the folders in it."""
    for package in PACKAGES:
        yield from sorted({path.parent for path in (root / package).rglob("*.py")})


def heading(path: Path) -> str:
    """Return the first line of a module's docstring. Raises ValueError if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path} has no docstring: say in its first line what the module is for")
    return text.partition("\n")[0].replace("|", "\\|")


def section(folder: Path, root: Path = ROOT) -> str:
    """Return the heading of a folder, and the table of its modules."""
    lines = [f"## {folder.relative_to(root).as_posix()}/", ""]
    package = folder / "__init__.py"
    if package.exists():
        lines += [heading(package), ""]
    modules = [path for path in sorted(folder.glob("*.py")) if path != package]
    if modules:
        lines += [
            "| module | contents |",
            "|---|---|",
            *(f"| `{path.name}` | {heading(path)} |" for path in modules),
            "",
        ]
    return "\n".join(lines)


def page(root: Path = ROOT) -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *(section(folder, root) for folder in folders(root))])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
