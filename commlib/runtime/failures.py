"""Failures: keep the works that ended badly, and report at the end those that were never asked how they ended."""

from __future__ import annotations

from commlib.runtime.work import Work


class Failures:
    """Keep the failures of one group."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def note(self, work: Work) -> None:
        """Note a work that has failed."""
        self._works = [other for other in self._works if other.unseen_error is not None]
        self._works.append(work)

    def unseen(self) -> str:
        """Return the first with an error that was never asked for, in words, or ""."""
        for work in self._works:
            if (error := work.unseen_error) is not None:
                return f"failed {work.description} ({type(error).__name__}: {error})"
        return ""
