"""Commands in README and docs: they run as written, or the page says why no test runs them.

A line before each console block says which: `<!-- run -->` (here: one script, in a folder with README's programs, after
the earlier blocks of its page), `<!-- run by tests/... -->`, or `<!-- not run: why -->`. The output that a block shows
below a command, after `$ `, must be what the command prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT
from tests.launch.test_readme import PROGRAMS

pytestmark = pytest.mark.any_mpi

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for place in ("README.md", "docs/pages/**/*.md", "examples/**/README.md", "benchmarks/README.md")
    for path in ROOT.glob(place)
)
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```console\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"not run: needs (a cluster|a GPU|a container|a network|root)\b")
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """Commands of a page, and their mark."""

    page: str
    line: int
    mark: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["mark"] or "", match["text"])
        for match in BLOCK.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]
RUN = [page for page in PAGES if any(block.mark == "run" for block in blocks(page))]


def test_every_block_is_marked() -> None:
    silent = []
    for block in ALL:
        by = re.fullmatch(r"run by (tests/\S+\.py)", block.mark)
        is_valid = block.mark == "run" or (by and (ROOT / by[1]).is_file()) or REASON.match(block.mark)
        if not is_valid:
            silent.append(f"{block.page}:{block.line}: {block.mark or 'no mark'}")
    assert not silent, "\n".join(silent)
    assert len(RUN) > 3


# Each starts a dozen jobs, a minute or two in all; other tests run the same commands.
LONG = tuple(f"docs/pages/{name}.md" for name in ("quickstart", "tour", "bench", "timeline"))


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.long) if page in LONG else page for page in RUN])
def test_commands_run(page: str, tmp_path: Path, launch_environment: dict[str, str]) -> None:
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    environment = {
        **launch_environment,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), launch_environment["PATH"]]),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    for block in blocks(page):
        if block.mark == "run":
            for script, expected in scripts(block.text):
                done = bash(script, tmp_path, environment)
                report = f"{page}:{block.line}\n{script}--- stdout:\n{done.stdout}\n--- stderr:\n{done.stderr}"
                assert done.returncode == 0, report
                assert expected is None or done.stdout.split() == expected.split(), report


def scripts(text: str) -> list[tuple[str, str | None]]:
    """Return the commands of a block, and the output of each, if the block shows it."""
    if not text.startswith("$ "):
        return [(text, None)]
    return [(f"{command}\n", expected) for command, expected in COMMAND.findall(text)]


def bash(script: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script, and end its jobs, too, if it hangs."""
    command = ["timeout", "--kill-after=5", "240", "bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
