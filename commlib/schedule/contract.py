"""Contract: define each verb by the input chunks of each rank at the start and the required chunks at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commlib.errors import UsageError
from commlib.schedule.ir import Program


@dataclass(frozen=True, slots=True)
class Promise:
    """At the end, `chunk` holds the input chunk `source` of rank `owner`, or its sum over all ranks if `owner` is None.

    first: sum over this many of the first ranks instead; 0 for all.
    """

    chunk: int
    owner: int | None
    source: int
    first: int = 0


def inputs(program: Program) -> Sequence[int]:
    """Return the chunks with this rank's input at the start; the others are undefined."""
    data = range(program.regions[0] if program.regions else 0)
    match program.verb:
        case "broadcast" | "scatter":
            return data if program.rank == program.root else ()
        case "all_gather" | "gather":
            return (program.rank,)
        case _:
            return data


def promises(program: Program) -> Iterator[Promise]:
    """Yield the chunks that this rank must hold at the end.

    A barrier yields none: instead, a signal of every rank must have reached each rank.
    """
    rank, size, root = program.rank, program.size, program.root
    data = range(program.regions[0] if program.regions else 0)
    at_root = rank == root
    match program.verb:
        case "all_reduce":
            yield from (Promise(chunk, None, chunk) for chunk in data)
        case "reduce":
            yield from (Promise(chunk, None, chunk) for chunk in data if at_root)
        case "reduce_scatter":
            yield Promise(rank, None, rank)
        case "broadcast":
            yield from (Promise(chunk, root, chunk) for chunk in data)
        case "all_gather":
            yield from (Promise(chunk, chunk, chunk) for chunk in data)
        case "gather":
            yield from (Promise(chunk, chunk, chunk) for chunk in data if at_root)
        case "scatter":
            yield Promise(rank, root, rank)
        case "all_to_all":  # and the input must not change
            yield from (Promise(chunk, rank, chunk) for chunk in data)
            yield from (Promise(size + source, source, rank) for source in data)
        case "scan":
            yield from (Promise(chunk, None, chunk, first=rank + 1) for chunk in data)
        case "exscan":
            yield from (Promise(1 + chunk, None, chunk, first=rank) for chunk in data if rank)
        case "barrier":
            return
        case unknown:
            raise UsageError(f"commlib.schedule.contract does not define the verb {unknown!r}")
