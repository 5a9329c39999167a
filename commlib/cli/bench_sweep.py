"""`commlib bench sweep`: many cases in one job, resumable, as JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import commlib

if TYPE_CHECKING:
    from commlib.bench.sweep.plan import SweepPlan


def bench_sweep(
    plan: Annotated[Path | None, typer.Argument(help="a TOML file; flags win over it")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="file of JSON lines (default: the plan's name, or sweep.jsonl)")
    ] = None,
    verb: Annotated[list[str] | None, typer.Option(help="repeatable, as all lists here (default: all_reduce)")] = None,
    size: Annotated[list[str] | None, typer.Option(help="bytes; K, M, G (default: 4K, 64K, 1M, 16M)")] = None,
    begin: Annotated[str | None, typer.Option("--begin", "-b", help="smallest size, instead of --size")] = None,
    end: Annotated[str | None, typer.Option("--end", "-e", help="largest size")] = None,
    factor: Annotated[int | None, typer.Option("--factor", "-f", help="from one size to the next (default: 4)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="default: float32")] = None,
    op: Annotated[list[str] | None, typer.Option(help="default: sum")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="default: auto; every: each one of the verb")] = None,
    nodes: Annotated[list[str] | None, typer.Option(help="number of nodes, the first ones; all (default)")] = None,
    ranks_per_node: Annotated[list[str] | None, typer.Option(help="ranks per node, the first; all (default)")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="in turn with each case: mpi, pieces, gloo, nccl, ordinary")
    ] = None,
    place: Annotated[list[str] | None, typer.Option(help="usual (default), in or out (of place)")] = None,
    symmetric: Annotated[bool | None, typer.Option("--symmetric/--ordinary", help="arrays from comm.empty")] = None,
    check: Annotated[bool | None, typer.Option("--check/--no-check", help="count wrong elements")] = None,
    rounds: Annotated[int | None, typer.Option(help="bursts of each contender (default: 5)")] = None,
    iters: Annotated[int | None, typer.Option("--iters", "-n", help="calls in each burst (default: 30 ms)")] = None,
    warmup_iters: Annotated[int | None, typer.Option("--warmup-iters", "-w", help="before each burst")] = None,
    case_seconds: Annotated[float | None, typer.Option(help="a longer case ends the job (default: 600)")] = None,
    seconds: Annotated[float | None, typer.Option(help="begin no case after this time (default: no limit)")] = None,
    device: Annotated[str | None, typer.Option(help="where the arrays are: host (default) or cuda")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="repeat cases that were wrong, refused or failed")] = False,
) -> None:
    """Measure verbs x sizes x dtypes x algorithms x worlds in one job.

        mpirun -n 8 commlib bench sweep plan.toml --out results.jsonl

    A world is the first --ranks-per-node ranks of the first --nodes nodes;
    the other ranks sleep meanwhile. Each case is one line of JSON, written
    when it ends. After a kill, start it again with the same file: it skips
    finished cases. A case that ends the job twice counts as failed.

    A plan has these flags' names as keys, lists in the plural:

        verbs = ["all_reduce", "all_gather"]

        sizes = ["4K", "1M"]

        nodes = [1, 2]

        ranks_per_node = [1, "all"]

        peers = ["mpi"]

    The exit code is 1 if a result was wrong or a case failed.
    """
    from commlib.bench.options import BenchOptionsError
    from commlib.bench.sweep.plan import SweepPlan, check_plan, parse_plan, read

    lists: dict[str, list[Any] | None] = {
        "verbs": verb,
        "sizes": size,
        "dtypes": dtype,
        "ops": op,
        "algorithms": algorithm,
        "nodes": _numbers(nodes),
        "ranks_per_node": _numbers(ranks_per_node),
        "peers": peer,
        "places": place,
    }
    singles: dict[str, Any] = {
        "symmetric": symmetric,
        "check": check,
        "rounds": rounds,
        "iters": iters,
        "warmup_iters": warmup_iters,
        "case_seconds": case_seconds,
        "seconds": seconds,
        "device": device,
    }
    try:
        table = {name: value for name, value in (lists | singles).items() if value is not None}
        given = parse_plan(table)
        flags = {name: getattr(given, name) for name in table}
        if (sizes := _range(begin, end, factor, size)) is not None:
            flags["sizes"] = sizes
        is_right = _run(
            lambda: check_plan(replace(SweepPlan() if plan is None else read(plan), **flags)),
            out or (Path("sweep.jsonl") if plan is None else plan.with_suffix(".jsonl")),
            retry,
        )
    except BenchOptionsError as error:  # on all ranks together
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if is_right else 1)


def _run(read: Callable[[], SweepPlan], out: Path, retry: bool) -> bool:
    commlib.init()  # reports problems with MPI, where the next import would only fail
    from commlib.bench.sweep import run

    return run.run(run.read_on_one(read), out, retry=retry)


def _numbers(values: list[str] | None) -> list[Any] | None:
    return None if values is None else [int(value) if value.isdecimal() else value for value in values]


def _range(begin: str | None, end: str | None, factor: int | None, size: list[str] | None) -> tuple[int, ...] | None:
    """Return the sizes of a range, or None if no option gives one. Raises Refused."""
    from commlib.bench.options import BenchOptionsError, parse_size, sizes_between

    if begin is None and end is None and factor is None:
        return None
    if size:
        raise BenchOptionsError("give either --size, or --begin, --end and --factor")
    return sizes_between(parse_size(begin or "4"), parse_size(end or "64M"), 4 if factor is None else factor)
