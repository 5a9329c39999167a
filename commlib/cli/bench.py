"""`commlib bench`: time a collective and its peers, with the columns of nccl-tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import commlib
from commlib.console.reserved_stdout import reserve_stdout

if TYPE_CHECKING:
    from commlib.bench.options import BenchOptions


def bench(
    verb: Annotated[
        str,
        typer.Argument(
            help="all_reduce, reduce_scatter, reduce_scatter_v, all_gather, all_gather_v, broadcast, reduce, "
            "all_to_all, all_to_all_v, gather, scatter, scan, exscan, send_recv (each rank to the next one) or "
            "barrier; or pairs: latency and bandwidth between every two ranks"
        ),
    ],
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="also measure: mpi, gloo (torch), pieces (MPI_Allreduce of 1 MiB at a time), ordinary (commlib on "
            "ordinary arrays), nccl (GPUs)"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="where the arrays are: host, or cuda, the GPU of each rank")] = "host",
    dtype: Annotated[list[str] | None, typer.Option(help="repeatable (default: float32)")] = None,
    op: Annotated[list[str] | None, typer.Option(help="sum, mean, min, max or prod; repeatable (default: sum)")] = None,
    begin: Annotated[
        str | None, typer.Option("--begin", "-b", help="smallest size in bytes; K, M, G (default: 4)")
    ] = None,
    end: Annotated[str | None, typer.Option("--end", "-e", help="largest size (default: 64M)")] = None,
    factor: Annotated[int | None, typer.Option("--factor", "-f", help="from one size to the next (default: 4)")] = None,
    size: Annotated[list[str] | None, typer.Option(help="this size instead; repeatable")] = None,
    in_place: Annotated[
        bool | None,
        typer.Option("--in-place/--out-of-place", help="default: in place for all_reduce and broadcast"),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--ordinary", help="arrays from comm.empty, or of numpy (default: symmetric)"),
    ] = None,
    asynchronous: Annotated[
        bool, typer.Option("--async", help="start each call on the progress thread, and wait for it")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="prepare the call once")] = False,
    algorithm: Annotated[str | None, typer.Option(help="commlib's algorithm (default: auto)")] = None,
    root: Annotated[int | None, typer.Option(help="of rooted verbs (default: 0)")] = None,
    rounds: Annotated[int, typer.Option(help="bursts of each contender")] = 9,
    iters: Annotated[
        int | None, typer.Option("--iters", "-n", "-i", help="calls in each burst (default: as many as fit in 30 ms)")
    ] = None,
    warmup_iters: Annotated[
        int | None,
        typer.Option(
            "--warmup-iters", "--warmup_iters", "-w", "-x", help="calls before each burst (default: half as many)"
        ),
    ] = None,
    percentiles: Annotated[
        bool, typer.Option("--percentiles", help="time each call separately, and add p50, p95 and p99")
    ] = False,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="out of place and in place on one line, as in nccl-tests")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="comma-separated values; remarks go to standard error")] = False,
    format: Annotated[
        str | None, typer.Option("--format", help="nccl or osu: print in the format of nccl-tests or OSU's benchmarks")
    ] = None,
    check: Annotated[bool, typer.Option(help="count wrong elements, of every contender, before and after")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="rewrite the data before each call")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for a JSON file and a PNG (extra 'plot')")] = None,
) -> None:
    """Time a collective and its peers, in turn, and check every element.

    Run it under mpirun or srun, or as a single process:

        mpirun -n 2 commlib bench all_reduce --peer mpi --out results

    Columns, as in nccl-tests:

    size: bytes of the buffer, or of all parts if each rank has one.

    count: elements of the buffer, or of one part.

    time: median over rounds of a burst's mean call, on the slowest rank.

    min..max: the shortest and the longest round.

    algbw: size / time. busbw: algbw x a factor, comparable with a link's.

    of bound: the time of one plain pass of all ranks over the memory that
    they must read and write, divided by time; on one node, from 64 KiB. More
    than 100% if caches keep data from call to call: see --fresh.

    #wrong: wrong elements of commlib's results, over all ranks. ratio: the
    peer's time / commlib's. The exit code is 1 if commlib has any.

    On a GPU (--device cuda): time is the host's, until the GPU is done; event
    us is that of CUDA events on the caller's stream. The bound is a copy of
    all ranks within the GPU that they share. Peers use ordinary arrays.

    p50, p95, p99: of single calls, each on its slowest rank.

    pairs: a matrix for each --size (8 and 4M by default), us up to 64 KiB
    and GB/s beyond, its extremes, and the slowest pair. One pair at a time,
    so 64 ranks take some minutes.

    See also: bench all (every verb in every form against MPI, one table),
    bench compare (two such tables), bench sweep (many cases in one job),
    bench report (an HTML page of results), bench step (training).
    """
    from commlib.bench.options import BenchOptions, BenchOptionsError

    if csv or format:
        reserve_stdout()
    try:
        options = BenchOptions(
            verb=verb,
            sizes=_sizes(begin, end, factor, size),
            dtypes=_tuple(dtype),
            ops=_tuple(op),
            peers=_tuple(peer) or (),
            in_place=in_place,
            symmetric=symmetric,
            asynchronous=asynchronous,
            plan=plan,
            algorithm=algorithm,
            root=root,
            rounds=rounds,
            check=check,
            fresh=fresh,
            out=out,
            iters=iters,
            warmup_iters=warmup_iters,
            percentiles=percentiles,
            side_by_side=side_by_side,
            csv=csv,
            format=format,
            device=device,
        )
        is_right = _run(verb, options)
    except BenchOptionsError as error:  # on all ranks together
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if is_right else 1)


def _run(verb: str, options: BenchOptions) -> bool:
    commlib.init()  # reports problems with MPI, where the next import would only fail
    from commlib.bench import pairs_run, run

    return pairs_run.run(options) if verb == "pairs" else run.run(options)


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return tuple(values) if values else None


def _sizes(begin: str | None, end: str | None, factor: int | None, size: list[str] | None) -> tuple[int, ...] | None:
    """Return the sizes in bytes, or None if no option gives them. Raises Refused."""
    from commlib.bench.options import BenchOptionsError, parse_size, sizes_between

    is_range = any(value is not None for value in (begin, end, factor))
    if size and is_range:
        raise BenchOptionsError("give either --size, or --begin, --end and --factor")
    if size:
        return tuple(map(parse_size, size))
    if not is_range:
        return None
    return sizes_between(parse_size(begin or "4"), parse_size(end or "64M"), 4 if factor is None else factor)
