"""`commlib bench step`: a training step with one kind of parallelism, on a fixed model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import commlib

if TYPE_CHECKING:
    from commlib.bench.steps.contract import StepSizes


def bench_step(
    kind: Annotated[str, typer.Argument(help="dp, tp, pp or moe: all ranks are on this one axis")],
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "torch",
    peer: Annotated[str | None, typer.Option(help="gloo: torch's DistributedDataParallel, for dp")] = None,
    width: Annotated[int, typer.Option(help="width of the model")] = 256,
    layers: Annotated[int, typer.Option(help="number of blocks of attention and a perceptron")] = 4,
    heads: Annotated[int, typer.Option(help="attention heads")] = 8,
    context: Annotated[int, typer.Option(help="tokens per row")] = 64,
    vocabulary: Annotated[int, typer.Option(help="number of distinct tokens")] = 256,
    rows: Annotated[int, typer.Option(help="rows per batch; per rank, for dp and moe")] = 8,
    microbatches: Annotated[int, typer.Option(help="microbatches of a pipeline")] = 4,
    experts: Annotated[int, typer.Option(help="experts per layer, for moe")] = 8,
    top_k: Annotated[int, typer.Option(help="experts per token")] = 2,
    rounds: Annotated[int, typer.Option(help="bursts of each contender, in turn")] = 9,
    iters: Annotated[int, typer.Option("--iters", "-n", help="steps in each burst")] = 5,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="file of JSON lines, as for a sweep")] = None,
) -> None:
    """Time a training step: forward, backward, optimizer.

        mpirun -n 2 commlib bench step dp --peer gloo --out results.jsonl

    The model is a decoder-only transformer. Timed in turn with it,
    "computes": the same computation of one rank without communication. The
    rest of the step is exposed: exposed communication, waiting, and for pp
    the bubble. The losses of two steps must equal those of the unsharded
    model, else the exit code is 1.
    """
    from commlib.bench.options import BenchOptionsError
    from commlib.bench.steps.contract import StepSizes

    sizes = StepSizes(width, layers, heads, context, vocabulary, rows, microbatches, experts, top_k)
    try:
        for name, value in (("rounds", rounds), ("iters", iters)):
            if value < 1:
                raise BenchOptionsError(f"--{name} is {value}: expected at least 1")
        if peer not in (None, "gloo"):
            raise BenchOptionsError(f"--peer {peer!r} is unknown; known is gloo")
        is_right = _run(kind, framework, sizes, rounds, iters, peer is not None, out)
    except BenchOptionsError as error:  # on all ranks together
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if is_right else 1)


def _run(kind: str, framework: str, sizes: StepSizes, rounds: int, iters: int, peer: bool, out: Path | None) -> bool:
    commlib.init()  # reports problems with MPI, where the next import would only fail
    from commlib.bench.steps import run

    return run.run(kind, framework, sizes, number=rounds, iters=iters, peer=peer, out=out)
