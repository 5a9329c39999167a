"""Failures: remember failed works, and report at shutdown those whose error no caller has seen."""

from __future__ import annotations

from commlib.runtime.work import Work


class Failures:
    """The failed works of one group."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def note(self, work: Work) -> None:
        """Remember a failed work."""
        self._works = [other for other in self._works if other.unseen_error is not None]
        self._works.append(work)

    def unseen(self) -> str:
        """Describe the first failed work whose error no caller has seen; "" without one."""
        for work in self._works:
            if (error := work.unseen_error) is not None:
                return f"failed {work.description} ({type(error).__name__}: {error})"
        return ""
