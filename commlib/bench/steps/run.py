"""One run of `commlib bench step` on all ranks: check the options, measure in turn, print, append to the results."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpi4py import MPI

import commlib
from commlib.arguments import install
from commlib.bench import gloo_peer
from commlib.bench.load import busy_text
from commlib.bench.measure import burst_of, rounds
from commlib.bench.options import BenchOptionsError
from commlib.bench.session import agree
from commlib.bench.steps.contract import Contenders, StepSizes, check
from commlib.bench.sweep import environment
from commlib.bench.sweep.results import FORMAT, Line, ResultsWriter
from commlib.bench.table import console
from commlib.console.text import seconds_text

TOLERANCE = 1e-3  # of a loss: sums have a different order, and one step has changed the weights
_ALONE, _OURS, _PEER = "alone", "commlib", "peer"


def run(kind: str, framework: str, sizes: StepSizes, *, number: int, iters: int, peer: bool, out: Path | None) -> bool:
    """Measure a step; return whether it trains like the unsharded model.

    number: rounds; iters: steps in each. peer: also measure torch's DistributedDataParallel over gloo (dp).
    Collective: all ranks pass the same arguments. Raises Refused on all of them for invalid ones.
    """
    comm, world = commlib.init(), MPI.COMM_WORLD
    check(kind, framework, sizes, comm.size)
    if peer and (kind, framework) != ("dp", "torch"):
        raise BenchOptionsError("--peer gloo is torch's DistributedDataParallel: it needs dp with --framework torch")
    agree(world, gloo_peer.problem() if peer else None)
    adapter, problem = _adapter(framework)
    agree(world, problem)
    facts = environment.gather(comm, world)
    with ExitStack() as stack:
        writer = _opened(stack, world, out)
        if peer:
            stack.enter_context(gloo_peer.join_gloo(world, one_node=comm.one_node))
        contenders: Contenders = adapter.contenders(kind, comm, sizes, peer=peer)
        difference = _difference(comm, contenders)
        seconds = _measured(world, contenders, number, iters)
        line = _line(kind, framework, sizes, facts, contenders, difference, seconds)
        if comm.rank == 0:
            show(line, facts)
        if writer is not None:
            _head(writer, facts)
            writer.add(line)
    return bool(line["status"] == "ok")


def _adapter(framework: str) -> tuple[Any, str | None]:
    """Return the adapter's module, or an error text. The core only knows its name."""
    try:
        return importlib.import_module(f"commlib_{framework}.bench_step"), None
    except ModuleNotFoundError as error:
        return None, f"--framework {framework} needs {error.name}: {install(framework)}"


def _difference(comm: Any, contenders: Contenders) -> float:
    """Return the largest relative difference between two steps' losses and the unsharded model's. Collective."""
    ours, whole = [], []
    for _ in range(2):
        ours.append(statistics.fmean(comm.all_gather_object(contenders.ours())))
        whole.append(contenders.whole())
    return max(abs(one - other) / abs(other) for one, other in zip(ours, whole, strict=True))


def _measured(world: Any, contenders: Contenders, number: int, iters: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each contender in each round, on the slowest rank. Collective."""
    steps = {_OURS: contenders.ours, _ALONE: contenders.alone}
    if contenders.peer is not None:
        steps[_PEER] = contenders.peer
    bursts = {name: burst_of(world, step, iters=iters, warm_up=1) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in bursts}
    for figures in rounds(bursts, number):
        for name, value in figures.items():
            times[name].append(value)
    return times


def _line(
    kind: str,
    framework: str,
    sizes: StepSizes,
    facts: dict[str, Any],
    contenders: Contenders,
    difference: float,
    seconds: dict[str, list[float]],
) -> Line:
    step, tokens = statistics.median(seconds[_OURS]), sizes.tokens(kind, facts["ranks"])
    peer_seconds = seconds.get(_PEER)
    is_right = math.isfinite(difference) and difference <= TOLERANCE
    return {
        "kind": "step",
        "key": f"step {kind} {framework} {facts['ranks']} ranks {sizes.text(kind)}",
        "kind_of_step": kind,
        "framework": framework,
        "ranks": facts["ranks"],
        "sizes": asdict(sizes),
        "model": sizes.text(kind),
        "parameters": contenders.parameters,
        "tokens": tokens,
        "status": "ok" if is_right else "wrong",
        "difference": difference if math.isfinite(difference) else None,
        "seconds": seconds,
        "step": step,
        "tokens_per_second": tokens / step,
        "alone": statistics.median(seconds[_ALONE]),
        "exposed": statistics.median(a - b for a, b in zip(seconds[_OURS], seconds[_ALONE], strict=True)),
        "peer": contenders.peer_name,
        "peer_step": None if peer_seconds is None else statistics.median(peer_seconds),
        "ratio": None
        if peer_seconds is None
        else statistics.median(b / a for a, b in zip(seconds[_OURS], peer_seconds, strict=True)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _opened(stack: ExitStack, world: Any, out: Path | None) -> ResultsWriter | None:
    """Return rank 0's writer, if results are to be written. Raises Refused on all ranks. Collective."""
    writer, problem = None, None
    if world.rank == 0 and out is not None:
        try:
            writer = stack.enter_context(ResultsWriter(out))
        except BenchOptionsError as error:
            problem = str(error)
    agree(world, problem)
    return writer


def _head(writer: ResultsWriter, facts: dict[str, Any]) -> None:
    """Write the environment, unless it is the last one in the file."""
    known = writer.results.environments
    if not known or environment.differences(known[-1]["facts"], facts):
        plan = {"steps": True} if not known else known[-1]["plan"]
        header = {"kind": "environment", "number": len(known), "format": FORMAT, "plan": plan, "facts": facts}
        writer.add(header)


def show(line: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Print the measurements, one figure per line."""
    step = line["step"]
    rows = [
        ("step", seconds_text(step)),
        ("tokens/s", f"{line['tokens_per_second']:,.0f}, of all ranks"),
        ("computes", f"{seconds_text(line['alone'])}, a rank's computation alone"),
        ("exposed", f"{_signed(line['exposed'])}, {line['exposed'] / step:.0%} of the step: communication and waiting"),
    ]
    if line["peer"]:
        rows.append((line["peer"], f"{seconds_text(line['peer_step'])}, {line['ratio']:.2f} times commlib's"))
    difference = "not finite" if line["difference"] is None else f"{line['difference']:.1e}"
    verdict = "same as" if line["status"] == "ok" else "NOT as"
    rows.append(("losses", f"{verdict} in one process: they differ by {difference}"))
    out = console()
    kind, framework = line["kind_of_step"], line["framework"]
    heading = f"# {kind} with {framework}, {line['ranks']} ranks, {facts['mpi']}"
    model = f"# {line['model']}, {line['parameters'] / 1e6:.2f} M parameters"
    if warning := busy_text(facts):
        model = f"# {warning}\n{model}"
    for text in (heading, model, *(f"{name:>14}  {text}" for name, text in rows)):
        out.print(text, markup=False, soft_wrap=True)


def _signed(seconds: float) -> str:
    return f"-{seconds_text(-seconds)}" if seconds < 0 else seconds_text(seconds)
