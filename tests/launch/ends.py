"""Checks of jobs that must succeed."""

from __future__ import annotations

from subprocess import CompletedProcess


def prints(done: CompletedProcess[str], *words: str) -> None:
    """Check that a job succeeded, and that its ranks printed these words in any order, and nothing else."""
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == sorted(words), done.stderr[-3000:]
