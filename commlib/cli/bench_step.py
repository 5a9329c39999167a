"""`commlib bench step`: a step of training with one kind of parallelism, on a stated model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import commlib

if TYPE_CHECKING:
    from commlib.bench.steps.contract import Sizes


def bench_step(
    kind: Annotated[str, typer.Argument(help="dp, tp, pp or moe: all ranks are on this one axis")],
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "torch",
    peer: Annotated[str | None, typer.Option(help="gloo: torch's DistributedDataParallel, for dp")] = None,
    width: Annotated[int, typer.Option(help="of the model")] = 256,
    layers: Annotated[int, typer.Option(help="blocks of attention and a perceptron")] = 4,
    heads: Annotated[int, typer.Option(help="of attention")] = 8,
    context: Annotated[int, typer.Option(help="tokens of a row")] = 64,
    vocabulary: Annotated[int, typer.Option(help="tokens that there are")] = 256,
    rows: Annotated[int, typer.Option(help="of a batch; of each rank, for dp and moe")] = 8,
    microbatches: Annotated[int, typer.Option(help="of a pipeline")] = 4,
    experts: Annotated[int, typer.Option(help="of each layer, for moe")] = 8,
    top_k: Annotated[int, typer.Option(help="experts of a token")] = 2,
    rounds: Annotated[int, typer.Option(help="bursts of each contender, in turn")] = 9,
    iters: Annotated[int, typer.Option("--iters", "-n", help="steps in each burst")] = 5,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="file of JSON lines, as of a sweep")] = None,
) -> None:
    """Time a step of training: forward, backward, optimizer.

        mpirun -n 2 commlib bench step dp --peer gloo --out results.jsonl

    The model is a decoder-only transformer. In turn with it, "computes": the
    same computation of a rank without the others. What the step takes beyond
    that is exposed: communication that nothing hides, waiting, and for pp
    the bubble. Two steps must have the losses of the undivided model, else
    the exit code is 1.
    """
    from commlib.bench.options import Refused
    from commlib.bench.steps.contract import Sizes

    sizes = Sizes(width, layers, heads, context, vocabulary, rows, microbatches, experts, top_k)
    try:
        for name, value in (("rounds", rounds), ("iters", iters)):
            if value < 1:
                raise Refused(f"--{name} is {value}: expected at least 1")
        if peer not in (None, "gloo"):
            raise Refused(f"--peer {peer!r} is unknown; known is gloo")
        is_right = _run(kind, framework, sizes, rounds, iters, peer is not None, out)
    except Refused as error:  # on all ranks together
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if is_right else 1)


def _run(kind: str, framework: str, sizes: Sizes, rounds: int, iters: int, peer: bool, out: Path | None) -> bool:
    commlib.init()  # says what is wrong with MPI, where the next import would only fail
    from commlib.bench.steps import run

    return run.run(kind, framework, sizes, number=rounds, iters=iters, peer=peer, out=out)
