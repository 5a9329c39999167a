"""The base of another benchmark's format: the data of its header, and the Protocol of a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from commlib.bench.rows import BenchRow


@dataclass(frozen=True, slots=True)
class Heading:
    """The data of a run. sizes: in bytes; iters, warmup_iters: calls of a burst and before it; pids: of the ranks."""

    verb: str
    sizes: tuple[int, ...]
    iters: int
    warmup_iters: int
    is_checked: bool
    facts: Mapping[str, Any]
    pids: Sequence[int]


class Format(Protocol):
    """The lines of a run: header, rows and footer.

    rows of a line: the same case out of place and in place, as far as measured.
    """

    def head(self) -> list[str]: ...

    def line(self, *rows: BenchRow) -> list[str]: ...

    def foot(self) -> list[str]: ...
