"""Step: the exposed communication of a data-parallel step of a torch model on GPUs.

    mpiexec -n 2 python benchmarks/gpu_step.py [--rounds 5] [--tiny] [--out FILE.json]

An MLP of torch; exposed communication is the additional time of a step, in per cent of a step without communication.
--tiny runs a small model on the host: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpi4py import MPI

import commlib
from commlib.bench import gloo_peer, record

REFERENCE = "no communication"
WIDTH, ROWS, STEPS, WARM_UP = 4096, 4096, 5, 2
TINY = {"width": 64, "rows": 8}


def measure(comm: Any, stack: ExitStack, *, tiny: bool, rounds: int) -> dict[str, Any]:
    """Measure and print the steps of all contenders; return the figures. Collective.

    In a dry run the model is on the host, because the emulated GPU has no tensors. If commlib_torch cannot train a
    model on a GPU, it prints "not yet" with the reason, and returns that.
    """
    try:
        import torch

        from benchmarks import data_parallel as training
    except ImportError as error:
        return _not_yet(comm, f"PyTorch is not installed: {error}")
    world = MPI.COMM_WORLD
    stack.enter_context(gloo_peer.join_gloo(world, one_node=comm.one_node))
    where = torch.device("cpu" if tiny else "cuda")
    width, rows = (TINY["width"], TINY["rows"]) if tiny else (WIDTH, ROWS)
    finish: Callable[[], None] = (lambda: None) if tiny else torch.cuda.synchronize
    options: Any = SimpleNamespace(keep_gradients=False)
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(rows, 784, generator=generator).to(where)
    labels = torch.randint(10, (rows,), generator=generator).to(where)
    models = {name: training.make_model(width).to(where) for name in (REFERENCE, "commlib", "no overlap", "DDP, gloo")}
    problem = ""
    try:
        steps = {
            REFERENCE: training.without_communication(comm, models[REFERENCE], options),
            "commlib": training.ours(comm, models["commlib"], options, overlap=True),
            "no overlap": training.ours(comm, models["no overlap"], options, overlap=False),
        }
        steps["commlib"](inputs, labels)
        steps["no overlap"](inputs, labels)
    except Exception as error:  # report any error
        problem = f"commlib_torch: {(str(error) or repr(error)).splitlines()[0]}"
    if problems := [text for text in world.allgather(problem) if text]:
        return _not_yet(comm, problems[0])
    steps["DDP, gloo"] = training.ddp_gloo(comm, models["DDP, gloo"], options)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for turn in range(WARM_UP + rounds):
        order = order[1:] + order[:1]
        for name in order:
            finish()
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                steps[name](inputs, labels)
            finish()
            elapsed = world.allreduce((time.perf_counter() - begin) / STEPS, MPI.MAX)
            if turn >= WARM_UP:
                seconds[name].append(elapsed)
    wrong = {name: 1 for name in steps if name != REFERENCE and _differ(world, models[name])}
    parameters = sum(parameter.numel() for parameter in models[REFERENCE].parameters())
    exposed = {
        name: statistics.median(100 * (one / base - 1) for one, base in zip(elapsed, seconds[REFERENCE], strict=True))
        for name, elapsed in seconds.items()
    }
    if comm.rank == 0:
        print(f"{parameters / 1e6:.1f} M parameters, {rows} rows per rank, {comm.size} ranks; by the host's clock")
        print(f"{'contender':<20}{'step ms':>10}{'exposed':>10}{'wrong':>7}")
        for name, elapsed in seconds.items():
            step = 1e3 * statistics.median(elapsed)
            print(f"{name:<20}{step:>10.2f}{exposed[name]:>8.1f} %{wrong.get(name, 0):>7}", flush=True)
    return {"seconds": seconds, "exposed_percent": exposed, "parameters": parameters, "wrong": wrong}


def _not_yet(comm: Any, why: str) -> dict[str, Any]:
    if comm.rank == 0:
        print(f"not yet: {why}", flush=True)
    return {"not_yet": why}


def _differ(world: Any, model: Any) -> bool:
    """Return whether the ranks' weights differ, after equal starts and training on different data. Collective."""
    bits = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return len(set(world.allgather(hashlib.sha256(bits).hexdigest()))) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the host")
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    arguments = parser.parse_args()
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    rounds = 1 if arguments.tiny else arguments.rounds
    with ExitStack() as stack:
        measured = measure(comm, stack, tiny=arguments.tiny, rounds=rounds)
    if comm.rank == 0 and arguments.out:
        record.write(arguments.out, "gpu step", facts, arguments, **measured)
    if wrong := measured.get("wrong"):
        raise SystemExit(f"weights differ among ranks: {wrong}")


if __name__ == "__main__":
    main()
