"""Data-parallel training with compressed gradients, ours and torch's: time, bytes and loss.

    source ci/env.sh
    python benchmarks/compression.py --hosts 4 --rate 100mbit --out result.json --plot result.png   # as root
    python benchmarks/compression.py --hosts 4 --rate 1gbit --width 256 --rows 2 --lr 0.05
    python benchmarks/compression.py --hosts 1 [--ranks-per-host 2]  # this node, no network

Starts one job on emulated hosts (ci/hosts.py) or on this node. The job trains a small transformer
(benchmarks/text_model.py) once per contender: from the same weights, on the same data, each with a separate model.
Contenders alternate in blocks of steps whose order rotates, so that all run under the same conditions.

A step's time is that of the slowest rank; the table shows the median. `sent` is the number of bytes sent by a host's
network card, including TCP and headers, per rank and step; on one node it is commlib's own count. `to loss` is the
training time in seconds until the validation loss is within 1 % of the final loss of uncompressed training; validation
after each block is not timed. `local` trains each rank separately: a lower bound of a step's time, and the loss without
the other ranks.

The default is plain SGD, for which error feedback is proved. With momentum or Adam the coarsest codecs (signs, random
elements) do worse with feedback, and diverge at high learning rates: try --optimizer.

Contenders that are not in the table of benchmarks/compression_contenders.py are names of commlib's compressions:
--contenders none int4 topk:ratio=0.001.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compression_contenders import CONTENDERS, RATES, Training, contender
from benchmarks.launching import run
from ci.hosts import bits_per_second
from commlib.bench import record

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
REFERENCE = "none"  # the reference for other contenders
NEAR = 1.01  # of the reference's loss: close enough to count as reached


@dataclass
class Figures:
    """Figures of one contender."""

    seconds: list[float] = field(default_factory=list)  # of each step, of the slowest rank
    sent: list[float | None] = field(default_factory=list)  # bytes per rank and step, of each block
    losses: list[float] = field(default_factory=list)  # of each step, mean over ranks
    validation: list[tuple[int, float, float]] = field(default_factory=list)  # after a block: steps, seconds, loss

    def first_below(self, loss: float) -> float | None:
        """Return the seconds until the validation loss was reached, or None."""
        return next((seconds for _, seconds, now in self.validation if now <= loss), None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="1: this node, not emulated (default: %(default)s)")
    parser.add_argument("--ranks-per-host", type=int, help="by default 1, and 2 on one host")
    parser.add_argument("--rate", default="100mbit", help="of every link, as tc writes it (default: %(default)s)")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=200, help="of each contender (default: %(default)s)")
    parser.add_argument("--block", type=int, default=10, help="steps per turn (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="of a batch, per rank (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--optimizer", choices=list(RATES), default="sgd", help="default: %(default)s, plain")
    parser.add_argument("--lr", type=float, help=f"learning rate (default: {RATES})")
    parser.add_argument(
        "--ddp-buckets", type=float, default=25, metavar="MIB", help="default: %(default)s, torch's own"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the job (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw loss against seconds into this file, .png or .svg")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a rank of the job
    options = parser.parse_args()
    options.ranks_per_host = options.ranks_per_host or (2 if options.hosts == 1 else 1)
    options.lr = options.lr or RATES[options.optimizer]
    if options.hosts < 1 or options.hosts * options.ranks_per_host < 2 or options.steps < options.block:
        parser.error("expected at least 1 host, 2 ranks, and as many steps as a block has")
    try:
        bits_per_second(options.rate)
    except ValueError as error:
        parser.error(str(error))
    return options


class Measurement:
    """A measurement: trains every contender on this rank, and gathers the figures of all ranks."""

    def __init__(self, world: Any, options: argparse.Namespace) -> None:
        from benchmarks.text_model import Sizes, load_text

        self.world, self.options = world, options
        self.sizes = Sizes(width=options.width, layers=options.layers)
        self.text, self.validation_text = load_text()
        self.figures = {name: Figures() for name in options.contenders}
        self.warm_up()
        self.trainings = {name: self.make(name) for name in options.contenders}

    def make(self, name: str) -> Training:
        from benchmarks.text_model import make_model

        return contender(name)(make_model(self.sizes, self.options.seed), self.options)

    def warm_up(self) -> None:
        """Compile and connect, on temporary models: the curves then begin with the first step."""
        for name in self.options.contenders:
            training = self.make(name)
            for step in range(4):  # DDP rebuilds its buckets after the first step, its PowerSGD begins with the third
                training.step(self.batch(step))
            training.close()

    def batch(self, step: int) -> Any:
        from benchmarks.text_model import batch_of

        rows, seed = self.options.rows, self.options.seed
        return batch_of(self.text, rows, self.sizes.context, seed=seed, rank=self.world.rank, step=step)

    def run(self) -> None:
        names = self.options.contenders
        for turn, start in enumerate(range(0, self.options.steps, self.options.block)):
            steps = range(start, min(start + self.options.block, self.options.steps))
            for position in range(len(names)):
                name = names[(position + turn) % len(names)]
                self.block(self.trainings[name], self.figures[name], steps)

    def block(self, training: Training, figures: Figures, steps: range) -> None:
        """Run these steps, and record their figures."""
        import numpy as np
        from mpi4py import MPI

        batches = [self.batch(step) for step in steps]
        times, losses, own = [], [], 0
        self.world.Barrier()
        before = self.sent_bytes()
        self.world.Barrier()
        for batch in batches:
            began = time.perf_counter()
            losses.append(training.step(batch))
            times.append(time.perf_counter() - began)
            own += training.sent() if training.sent is not None else 0
        self.world.Barrier()
        nbytes: float | None = (self.sent_bytes() - before) / self.options.ranks_per_host
        if self.options.hosts == 1:
            nbytes = own if training.sent is not None else None
        slowest, mean = np.array(times), np.array(losses)
        self.world.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        self.world.Allreduce(MPI.IN_PLACE, mean, MPI.SUM)
        figures.seconds += slowest.tolist()
        figures.losses += (mean / self.world.size).tolist()
        figures.sent.append(None if nbytes is None else self.world.allreduce(nbytes / len(steps)) / self.world.size)
        figures.validation.append((steps.stop, sum(figures.seconds), self.validate(training)))

    def sent_bytes(self) -> int:
        """Return the number of bytes that this host has sent so far."""
        return 0 if self.options.hosts == 1 else int(SENT.read_text())

    def validate(self, training: Training) -> float:
        """Return the validation loss; each rank computes a share of it."""
        import torch

        from benchmarks.text_model import VALIDATION, batch_of, loss_of

        rank, seed = self.world.rank, self.options.seed
        batch = batch_of(self.validation_text, 32, self.sizes.context, seed=seed, rank=rank, step=VALIDATION)
        with torch.no_grad():
            loss: float = self.world.allreduce(loss_of(training.model, batch).item()) / self.world.size
        return loss


def work(options: argparse.Namespace) -> int:
    """Run one rank of the job."""
    import torch
    from mpi4py import MPI

    import commlib
    from commlib.bench import gloo_peer

    torch.set_num_threads(1)
    commlib.init()
    world = MPI.COMM_WORLD.Dup()
    facts = record.gather_program_facts(world, starts_itself=True)
    with gloo_peer.join_gloo(world, one_node=options.hosts == 1):
        measurement = Measurement(world, options)
        measurement.run()
    if world.rank:
        return 0
    parameters = sum(p.numel() for p in next(iter(measurement.trainings.values())).model.parameters())
    where = f"{options.hosts} hosts, {options.rate}" if options.hosts > 1 else "one node"
    title = f"{where}, {world.size} ranks, {os.cpu_count()} cores, {parameters / 1e6:.2f} M parameters"
    title += f", {options.rows} rows per rank, {options.steps} steps, {options.optimizer} lr={options.lr:g}"
    print(title)
    show(measurement.figures)
    measured = {"title": title, "figures": {name: asdict(of) for name, of in measurement.figures.items()}}
    if options.out:
        record.write(options.out, "compression", facts, options, parameters=parameters, **measured)
    if options.plot:
        from benchmarks.compression_plot import draw

        draw(measured, options.plot)
    return 0


def show(figures: dict[str, Figures]) -> None:
    """Print the table. Ratios are to uncompressed training, if it is a contender."""
    step_of_reference = nbytes_of_reference = goal = None
    if reference := figures.get(REFERENCE):
        step_of_reference, nbytes_of_reference = statistics.median(reference.seconds), mean_of(reference.sent)
        goal = reference.validation[-1][2] * NEAR
    titles = ("step ms", "ratio", "sent KiB", "ratio", "train", "valid", "to loss")
    print(f"{'contender':<20}" + "".join(f"{title:>10}" for title in titles))
    for name, of in figures.items():
        step, nbytes = statistics.median(of.seconds), mean_of(of.sent)
        cells = [f"{step * 1e3:.1f}", ratio(step, step_of_reference)]
        cells += ["-" if nbytes is None else f"{nbytes / 1024:.1f}", ratio(nbytes, nbytes_of_reference)]
        cells += [f"{statistics.mean(of.losses[-20:]):.3f}", f"{of.validation[-1][2]:.3f}"]
        reached = None if goal is None else of.first_below(goal)
        cells.append("-" if reached is None else f"{reached:.1f} s")
        print(f"{name:<20}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.3f}" if value is not None and reference else "-"


if __name__ == "__main__":
    sys.exit(run(__file__, parse(), work))
