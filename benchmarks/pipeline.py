"""Step time of pipelines on CPUs: ours against torch.distributed.pipelining and the simulator, and of empty stages.

    mpiexec -n 2 python benchmarks/pipeline.py [--out result.json] [--rounds 15] [--schedules gpipe,1f1b]

Three parts. "peers": our pipeline and torch's over gloo train equal models with a stage on each rank, in turn in one
process per rank, at several sizes of a microbatch; another column has the computing time alone on the schedule's
longest path. "bubble": stages sleep instead of computing, for equal or unequal times, against the simulator's
prediction. "overhead": the time per action of empty stages. A round's figure is its slowest rank's mean step time; the
tables show medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed import pipelining

import commlib
from commlib.bench import gloo_peer, record
from commlib.pipeline.runner import Runner
from commlib.pipeline.schedule import Costs, chain, make, simulate, verify
from commlib.pipeline.stage import StageValues
from commlib_torch import pipeline

Step = Callable[[], object]

# The kind of layers, the rows of a microbatch, and the width of the layers. A stage's computing time is measured.
SIZES = (
    ("perceptron", 8, 128),
    ("perceptron", 32, 384),
    ("perceptron", 256, 1024),
    ("convolutions", 1, 8),
    ("convolutions", 16, 16),
)
LAYERS = 2  # in a stage
SIDE = 64  # of the images of convolutions, in pixels
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


def layers(kind: str, count: int, width: int) -> nn.Sequential:
    """Return a network of identical layers, the same on every rank."""
    torch.manual_seed(0)

    def layer() -> nn.Module:
        return nn.Linear(width, width) if kind == "perceptron" else nn.Conv2d(width, width, 3, padding=1)

    return nn.Sequential(*(nn.Sequential(layer(), nn.ReLU()) for _ in range(count)))


def batch(kind: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return x and y, the same on all ranks."""
    shape = (rows, width) if kind == "perceptron" else (rows, width, SIDE, SIDE)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def ours(comm: Any, model: nn.Sequential, name: Any, microbatches: int, x: Tensor, y: Tensor) -> Step:
    pipe = pipeline(model, comm, schedule=name, microbatches=microbatches, loss=nn.functional.mse_loss)

    def step() -> None:
        pipe.zero_grad()
        pipe.step(x, y)

    return step


def theirs(comm: Any, model: nn.Sequential, name: str, microbatches: int, x: Tensor, y: Tensor) -> Step:
    """Return a step of torch.distributed.pipelining over gloo, with a stage of as many layers on each rank."""
    size = len(model) // comm.size
    part = model[comm.rank * size : (comm.rank + 1) * size]
    stage = pipelining.PipelineStage(part, comm.rank, comm.size, torch.device("cpu"))
    schedule = getattr(pipelining, PEERS[name])(stage, microbatches, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        part.zero_grad()
        if comm.rank == 0:
            schedule.step(x)
        elif comm.rank == comm.size - 1:
            schedule.step(target=y)
        else:
            schedule.step()

    return step


def in_turn(comm: Any, steps: dict[str, Step], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds per step, per contender and round."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            comm.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                steps[name]()
            slowest = max(comm.all_gather_object((time.perf_counter() - began) / repeats))
            if turn >= 2:
                seconds[name].append(slowest)
    return seconds


def peers(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for kind, rows, width in SIZES:
        for name in arguments.schedules.split(","):
            count = arguments.microbatches
            x, y = batch(kind, rows * count, width)
            steps = {
                who: make_one(comm, layers(kind, LAYERS * comm.size, width), name, count, x, y)
                for who, make_one in (("ours", ours), ("torch", theirs))
            }
            alone = max(comm.all_gather_object(compute_seconds(layers(kind, LAYERS, width), x[:rows], y[:rows])))
            seconds = in_turn(comm, steps, arguments.rounds, max(1, round(5e-3 / alone)))
            size = {"kind": kind, "rows": rows, "width": width, "nbytes": x[:rows].nbytes}
            results.append({**size, "schedule": name, "computes": alone, "seconds": seconds})
    return results


def compute_seconds(part: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the seconds of forward and backward of one microbatch in one stage, including the input's gradient."""
    times = []
    for _ in range(12):
        began = time.perf_counter()
        nn.functional.mse_loss(part(x.detach().requires_grad_()), y).backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Arrays:
    """A framework whose arrays are its tensors."""

    device = None  # host memory

    def read(self, value: Any) -> Any:
        return value

    def array(self, value: Any) -> Any:
        return value

    def wants_gradient(self, value: Any) -> bool:
        return True

    def tensor(self, array: Any, *, wants_gradient: bool) -> Any:
        return array

    def memory(self, value: Any) -> Any:
        return None

    def is_used(self, memory: Any) -> bool:
        return False

    def move(self, memory: Any) -> None:
        pass


class SleepingStage:
    """A stage that sleeps instead of computing."""

    def __init__(self, stage: int, stages: int, seconds: float) -> None:
        self._before, self._after = stage > 0, stage < stages - 1
        self._stage, self._seconds = stage, seconds
        self._values = StageValues([np.zeros(256, np.float32)])

    def _sleep(self, times: float) -> None:
        if self._seconds:
            time.sleep(times * self._seconds)

    def forward(self, microbatch: int, inputs: Any) -> Any:
        self._sleep(1)
        return {self._stage + 1: self._values} if self._after else {}

    def backward(self, microbatch: int, gradients: Any, *, final: bool) -> Any:
        self._sleep(2)
        return {self._stage - 1: self._values} if self._before else {}

    def backward_input(self, microbatch: int, gradients: Any) -> Any:
        self._sleep(1)
        return {self._stage - 1: self._values} if self._before else {}

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        self._sleep(1)

    def reduce(self) -> None: ...

    def step(self) -> None: ...

    def use(self, version: int) -> None: ...


def bubble(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the time of sleeping stages with the simulator's; the mean oversleep is measured first."""
    unit = arguments.sleep_ms / 1e3
    late = statistics.mean(_oversleep(unit) for _ in range(100))  # they add up
    rows = []
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipev"):
        for kind in ("even", "uneven"):
            schedule = make(name, comm.size, arguments.microbatches)
            stages = schedule.stages
            weights = [1.0 + 0.5 * (stage % 3) if kind == "uneven" else 1.0 for stage in range(stages)]
            own = {s: SleepingStage(s, stages, unit * weights[s]) for s in schedule.stages_of(comm.rank)}
            lowered = verify(schedule, chain(stages))
            part = comm.split(0, name=f"{name} {kind}")
            runner = Runner(part, lowered, own, Arrays())
            costs = Costs(
                tuple(unit * w + late for w in weights),
                tuple(unit * w + late for w in weights),
                tuple(unit * w + (0 if name in ("gpipe", "1f1b", "interleaved") else late) for w in weights),
            )
            expected = simulate(lowered, costs)
            seconds = in_turn(comm, {"ours": runner.run}, 5, 1)["ours"]
            busy = sum(expected.busy) / comm.size
            got = statistics.median(seconds)
            rows.append(
                {
                    "schedule": name,
                    "stages": kind,
                    "seconds": seconds,
                    "simulated": expected.seconds,
                    "bubble": 1 - busy / got,
                    "simulated_bubble": expected.bubble,
                }
            )
            runner.close()
    return rows


def _oversleep(seconds: float) -> float:
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began - seconds


def overhead(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in ("1f1b", "zb_h1", "interleaved"):
        schedule = make(name, comm.size, 64)
        own = {s: SleepingStage(s, schedule.stages, 0) for s in schedule.stages_of(comm.rank)}
        lowered = verify(schedule, chain(schedule.stages))
        runner = Runner(comm.split(0, name=name), lowered, own, Arrays())
        seconds = in_turn(comm, {"ours": runner.run}, arguments.rounds, 5)["ours"]
        actions = max(len(program) for program in lowered.schedule.programs)
        rows.append({"schedule": name, "actions": actions, "seconds": seconds})
        runner.close()
    return rows


def show(measured: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        result = Table(title=f"{title}, {ranks} ranks")
        for column in columns:
            result.add_column(column, justify="right")
        return result

    console = Console(width=120)
    columns = ("computes, ms", "KiB", "schedule", "ours, ms", "torch, ms", "ratio")
    one = table("peers: a microbatch computes in a stage, and sends", "layers", *columns)
    for row in measured["peers"]:
        mine, other = (row["seconds"][who] for who in ("ours", "torch"))
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        cells = [1e3 * statistics.median(values) for values in (mine, other)]
        numbers = [1e3 * row["computes"], *cells]
        texts = [f"{number:.2f}" for number in numbers]
        size = f"{row['kind']} {row['rows']} x {row['width']}"
        one.add_row(size, texts[0], str(row["nbytes"] >> 10), row["schedule"], *texts[1:], f"{ratio:.3f}")
    console.print(one)
    two = table("bubble", "schedule", "stages", "ms", "simulated, ms", "bubble", "simulated")
    for row in measured["bubble"]:
        milliseconds = 1e3 * statistics.median(row["seconds"])
        bubbles = (row["bubble"], row["simulated_bubble"])
        shown = (f"{milliseconds:.1f}", f"{1e3 * row['simulated']:.1f}", *(f"{value:.3f}" for value in bubbles))
        two.add_row(row["schedule"], row["stages"], *shown)
    console.print(two)
    three = table("overhead", "schedule", "actions", "us per action")
    for row in measured["overhead"]:
        per_action = 1e6 * statistics.median(row["seconds"]) / row["actions"]
        three.add_row(row["schedule"], str(row["actions"]), f"{per_action:.1f}")
    console.print(three)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sleep-ms", type=float, default=5.0, help="of a forward, in the part 'bubble'")
    parser.add_argument("--parts", default="peers,bubble,overhead")
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    parts = {"peers": peers, "bubble": bubble, "overhead": overhead}
    with ExitStack() as stack:
        stack.enter_context(gloo_peer.join_gloo(MPI.COMM_WORLD, one_node=comm.one_node))
        chosen = arguments.parts.split(",")
        measured = {name: part(comm, arguments) if name in chosen else [] for name, part in parts.items()}
    if comm.rank:
        return
    show(measured, comm.size)
    if arguments.out:
        record.write(arguments.out, "pipeline", facts, arguments, **measured)


if __name__ == "__main__":
    main()
