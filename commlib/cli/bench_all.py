"""`commlib bench all`: a table of every verb in every form against the best of MPI's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import commlib

if TYPE_CHECKING:
    from commlib.bench.all_verbs.selection import Selection


def bench_all(
    peer: Annotated[str, typer.Option(help="mpi: the only one")] = "mpi",
    verbs: Annotated[str | None, typer.Option(help="some of them, such as all_reduce,scan (default: all)")] = None,
    sizes: Annotated[str | None, typer.Option(help="bytes; K, M (default: 4,64,1K,16K,64K,1M,4M,16M,64M)")] = None,
    forms: Annotated[str | None, typer.Option(help="of blocking,asynchronous,planned (default: all)")] = None,
    memory: Annotated[str | None, typer.Option(help="ordinary or symmetric arrays (default: both)")] = None,
    seconds: Annotated[float | None, typer.Option(help="time for all cells together (default: 900)")] = None,
    rounds: Annotated[int | None, typer.Option(help="at most so many bursts of each contender (default: 15)")] = None,
    json: Annotated[Path | None, typer.Option(help="file for all raw figures")] = None,
    check: Annotated[bool, typer.Option("--check", help="exit code 1 if a cell misses its goal")] = False,
) -> None:
    """Time every verb in every form against MPI, as one table.

        mpirun -n 2 commlib bench all --json all.json

    A cell is "commlib:MPI", microseconds of a call on the slowest rank, the
    median of rounds in which all contenders take turns, in alternating
    order, on the same float32 arrays. Bytes as in `commlib bench VERB`.

    MPI's is its fastest form: the blocking call; MPI_Reduce_scatter_block;
    MPI_Allreduce in segments of 1 MiB from 16 MiB; and, against plans, the
    persistent collective. Marks name it. asynchronous: with its wait.

    Cells that miss their goal are marked and listed. Every result is checked
    before and after: the exit code is 1 if commlib's is wrong or failed.

    If the time does not suffice, rows have fewer rounds, at least 5, and the
    last rows are listed as unmeasured.

    See also: bench compare, two such files.
    """
    from commlib.bench.all_verbs.selection import select
    from commlib.bench.options import BenchOptionsError

    try:
        if peer != "mpi":
            raise BenchOptionsError(f"--peer {peer!r} is unknown; known is mpi")
        is_right, is_fast = _run(
            select(verbs=verbs, sizes=sizes, forms=forms, memory=memory, seconds=seconds, rounds=rounds, json=json)
        )
    except BenchOptionsError as error:  # on all ranks together
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if is_right and (is_fast or not check) else 1)


def _run(selection: Selection) -> tuple[bool, bool]:
    commlib.init()  # reports problems with MPI, where the next import would only fail
    from commlib.bench.all_verbs import run

    return run.run(selection)
