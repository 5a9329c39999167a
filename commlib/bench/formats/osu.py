"""The format of the OSU micro-benchmarks 7.x: `osu_allreduce` and its siblings.

Sizes are OSU's: the bytes of one part for allgather, alltoall, gather and scatter, those of the buffer for the others.
Times are those of the slowest rank; OSU prints the mean over ranks. Source: outputs of OSU 7.1 to 7.5.
"""

from __future__ import annotations

from commlib.bench.formats.base import Heading
from commlib.bench.rows import BenchRow

VERSION = "7.5"  # the version of the format
TITLES = {
    "all_reduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter",
    "all_gather": "Allgather",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_to_all": "All-to-All Personalized Exchange",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
}
_OF_A_PART = ("all_gather", "all_to_all", "gather", "scatter")
_TYPES = {
    "float32": "MPI_FLOAT", "float64": "MPI_DOUBLE", "int8": "MPI_CHAR", "uint8": "MPI_UINT8_T",
    "int16": "MPI_INT16_T", "uint16": "MPI_UINT16_T", "int32": "MPI_INT", "uint32": "MPI_UINT32_T",
    "int64": "MPI_INT64_T", "uint64": "MPI_UINT64_T", "bool": "MPI_C_BOOL",
    "complex64": "MPI_C_FLOAT_COMPLEX", "complex128": "MPI_C_DOUBLE_COMPLEX",
}  # fmt: skip


class OsuFormat:
    """The lines of one run: a table per type."""

    def __init__(self, heading: Heading) -> None:
        self._verb = heading.verb
        self._dtype: str | None = None

    def head(self) -> list[str]:
        """Return the header lines."""
        lines = ["", f"# OSU MPI {TITLES[self._verb]} Latency Test v{VERSION}"]
        return [*lines, "# Avg Latency(us)"] if self._verb == "barrier" else lines

    def line(self, *rows: BenchRow) -> list[str]:
        """Return the line of one size, after the titles if a new type begins."""
        row = rows[0]
        if self._verb == "barrier":
            return [f"{row.time() * 1e6:17.2f}"]
        lines = []
        if row.dtype != self._dtype:
            self._dtype = row.dtype
            name = _TYPES.get(row.dtype, row.dtype)
            lines = [f"# Datatype: {name}.", f"{'# Size':<10}{'Avg Latency(us)':>18}"]
        size = row.size // row.ranks if self._verb in _OF_A_PART else row.size
        return [*lines, f"{size:<10}{row.time() * 1e6:18.2f}"]

    def foot(self) -> list[str]:
        """Return the footer lines: none."""
        return []
