"""The record of a benchmark names the commit of its checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

from commlib.bench.record import commit_of


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_record_names_the_commit_and_local_changes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "Begin")
    commit = git(tmp_path, "rev-parse", "HEAD")[:10]
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert commit_of(tmp_path) == commit + "+"


def test_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    (tmp_path / ".git").write_text("no git\n")
    assert commit_of(tmp_path) == ""
