"""Step time of data-parallel training on CPUs, ours against MPI and torch's DistributedDataParallel.

    mpiexec -n 2 python benchmarks/data_parallel.py [--out result.json] [--rounds 20] [--steps 5] [--width 1152]

A multilayer perceptron 784-width x 4-10 is trained by SGD with momentum on random data, by default 64 rows and one
thread per rank. The contenders alternate inside one process per rank, in rounds whose order rotates, each with a
separate model, so they run under the same conditions. A round's figure is its slowest rank's mean step time; the table
shows median and spread over rounds, and the median over rounds of the ratio to a step without communication.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

import commlib
from commlib.bench import gloo_peer, record
from commlib_torch import DistributedOptimizer
from commlib_torch._autograd import backward_passes

Step = Callable[[Tensor, Tensor], None]


def make_model(width: int) -> nn.Module:
    """Return an MLP, the same on every rank."""
    torch.manual_seed(0)
    sizes = [784, width, width, width, width, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    arguments: argparse.Namespace,
    between: Callable[[], None] | None = None,
) -> Step:
    """Return a training step; `between` runs between backward and the optimizer."""

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad(set_to_none=not arguments.keep_gradients)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if between is not None:
            between()
        optimizer.step()

    return step


def without_communication(comm: Any, model: nn.Module, arguments: argparse.Namespace) -> Step:
    return plain_step(model, make_optimizer(model), arguments)


def only_meeting(comm: Any, model: nn.Module, arguments: argparse.Namespace) -> Step:
    """Return a step with a barrier and no data: the minimum of any synchronous training."""
    return plain_step(model, make_optimizer(model), arguments, comm.barrier)


def ours(comm: Any, model: nn.Module, arguments: argparse.Namespace, **options: Any) -> Step:
    return with_optimizer(comm, model, arguments, **options)[0]


def with_optimizer(comm: Any, model: nn.Module, arguments: argparse.Namespace, **options: Any) -> tuple[Step, Any]:
    """Return our step and its DistributedOptimizer."""
    optimizer: Any = DistributedOptimizer(make_optimizer(model), model.named_parameters(), **options)
    train = plain_step(model, optimizer, arguments)
    backward_passes.leave(optimizer._gradients)

    def step(inputs: Tensor, labels: Tensor) -> None:
        # With several reducers in one process, none launches before backward ends. So only one exists at a time.
        backward_passes.join(optimizer._gradients)
        train(inputs, labels)
        backward_passes.leave(optimizer._gradients)

    return step, optimizer


def flat_mpi(comm: Any, model: nn.Module, arguments: argparse.Namespace) -> Step:
    """Return a step with one MPI_Allreduce of all gradients in one buffer, which the optimizer reads."""
    from mpi4py import MPI

    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    world = MPI.COMM_WORLD.Dup()

    def reduce() -> None:
        if parameters[0].grad is not views[0]:
            torch._foreach_copy_(views, [p.grad for p in parameters if p.grad is not None])
        world.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.mul_(1 / world.size)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    return plain_step(model, make_optimizer(model), arguments, reduce)


def ddp_gloo(comm: Any, model: nn.Module, arguments: argparse.Namespace, **options: Any) -> Step:
    """Return a step of torch's DistributedDataParallel on gloo, with torch's defaults unless `options` are given."""
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    return plain_step(wrapped, make_optimizer(model), arguments)


CONTENDERS: dict[str, Callable[..., Step]] = {
    "no communication": without_communication,
    "only meeting": only_meeting,
    "ours": ours,
    "flat MPI_Allreduce": flat_mpi,
    "torch DDP, gloo": ddp_gloo,
}
# Additional contenders of --sweep: other bucket sizes, with and without overlap.
SWEEP: dict[str, dict[str, Any]] = {
    "ours, overlap": {"overlap": True},
    "ours, overlap, 25 MiB": {"overlap": True, "bucket_cap_mib": 25},
    "ours, overlap, 100 MiB": {"overlap": True, "bucket_cap_mib": 100, "first_bucket_mib": 100},
    "ours, no overlap, 25 MiB": {"overlap": False, "bucket_cap_mib": 25},
    "ours, no overlap, 100 MiB": {"overlap": False, "bucket_cap_mib": 100, "first_bucket_mib": 100},
}


def measure(comm: Any, steps: dict[str, Step], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds per step of every contender in every round."""
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(arguments.rows, 784, generator=generator)
    labels = torch.randint(10, (arguments.rows,), generator=generator)
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.warm_up + arguments.rounds):
        for position in range(len(names)):
            name = names[(position + turn) % len(names)]
            comm.barrier()
            started = time.perf_counter()
            for _ in range(arguments.steps):
                steps[name](inputs, labels)
            slowest = max(comm.all_gather_object((time.perf_counter() - started) / arguments.steps))
            if turn >= arguments.warm_up:
                seconds[name].append(slowest)
    return seconds


def show(seconds: dict[str, list[float]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("contender", "median ms", "10% ms", "90% ms", "ratio", "spread of ratio"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    reference = seconds["no communication"]
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, reference, strict=True)]
        cells = [1e3 * statistics.median(values), 1e3 * quantile(values, 0.1), 1e3 * quantile(values, 0.9)]
        table.add_row(
            name,
            *(f"{cell:.2f}" for cell in cells),
            f"{statistics.median(ratios):.3f}",
            f"{quantile(ratios, 0.1):.2f} to {quantile(ratios, 0.9):.2f}",
        )
    Console(width=120).print(table)


def quantile(values: list[float], fraction: float) -> float:
    return sorted(values)[round(fraction * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1152, help="of the hidden layers")
    parser.add_argument("--rows", type=int, default=64, help="of a batch, per rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--steps", type=int, default=5, help="per round and contender")
    parser.add_argument(
        "--keep-gradients",
        action="store_true",
        help="zero gradients in place, zero_grad(set_to_none=False), instead of letting autograd allocate new ones",
    )
    parser.add_argument("--sweep", action="store_true", help="measure bucket sizes and overlap too")
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    contenders: dict[str, Callable[..., Step]] = dict(CONTENDERS)
    options = dict(SWEEP) if arguments.sweep else {}
    with ExitStack() as stack:
        stack.enter_context(gloo_peer.join_gloo(MPI.COMM_WORLD, one_node=comm.one_node))
        steps = {name: make(comm, make_model(arguments.width), arguments) for name, make in contenders.items()}
        for name, chosen in options.items():
            steps[name] = ours(comm, make_model(arguments.width), arguments, **chosen)
        seconds = measure(comm, steps, arguments)
        count = sum(parameter.numel() for parameter in make_model(arguments.width).parameters())
    if comm.rank:
        return
    title = f"{count / 1e6:.2f} M parameters, {comm.size} ranks, {os.cpu_count()} cores, {arguments.rows} rows per rank"
    show(seconds, title)
    if arguments.out:
        record.write(arguments.out, "data_parallel", facts, arguments, parameters=count, seconds=seconds)


if __name__ == "__main__":
    main()
