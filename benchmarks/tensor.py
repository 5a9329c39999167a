"""Step time of a sharded transformer block on CPUs: ours against torch's DTensor over gloo, and against one process.

    mpiexec -n 2 python benchmarks/tensor.py [--out result.json] [--rounds 15] [--tokens 1,16,64,512]

The same block (attention of 8 heads with three projections, a feed-forward network of 4 times the width, both with a
norm before and a residual around) runs forward and backward: sharded by commlib, sharded by parallelize_module with
ColwiseParallel and RowwiseParallel, and unsharded on rank 0 alone while the others wait. Contenders take turns in one
process per rank; a round's figure is its slowest rank's mean step time, and ratios are medians over rounds. "computes"
is the time of this rank's shard without communication. Further columns: memory per rank, and bytes sent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commlib
from commlib.bench import gloo_peer, record
from commlib.tensor_parallel import Column, Row
from commlib_torch.tensor import parallelize

Step = Callable[[Tensor], object]

COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")


class Block(nn.Module):
    """A plain transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


def block(arguments: argparse.Namespace) -> Block:
    torch.manual_seed(0)
    return Block(arguments.width, arguments.heads)


def ours(comm: Any, arguments: argparse.Namespace) -> nn.Module:
    columns = Column(units=arguments.heads)
    return parallelize(block(arguments), comm, {"[qkv]": columns, "out": Row(), "up": Column(), "down": Row()})


def theirs(comm: Any, arguments: argparse.Namespace) -> nn.Module:
    plan: Any = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
    plan = {name: type(style)() for name, style in plan.items()}
    return parallelize_module(block(arguments), init_device_mesh("cpu", (comm.size,)), plan)


def own_part(comm: Any, arguments: argparse.Namespace) -> nn.Module:
    """Return the computation of a rank, without communication."""
    part = block(arguments)
    for name in COLUMNS:
        layer: Any = part.get_submodule(name)
        layer.weight.data = layer.weight.data.chunk(comm.size)[comm.rank].clone()
        layer.bias.data = layer.bias.data.chunk(comm.size)[comm.rank].clone()
    for name in ROWS:
        layer = part.get_submodule(name)
        layer.weight.data = layer.weight.data.chunk(comm.size, 1)[comm.rank].clone()
    return part


def stepping(model: nn.Module) -> Step:
    def step(x: Tensor) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return step


def in_turn(comm: Any, steps: dict[str, Step], x: Tensor, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds per step, per contender and round; "one process" is rank 0's."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            comm.barrier()
            began = time.perf_counter()
            if name != "one process" or comm.rank == 0:
                for _ in range(repeats):
                    steps[name](x)
            slowest = max(comm.all_gather_object((time.perf_counter() - began) / repeats))
            if turn >= 2:
                seconds[name].append(slowest)
    return seconds


def saved_bytes(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Return the bytes of the parameters, and of the tensors that forward saves for backward."""
    sizes: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(x)  # held: later tensors must not reuse its memory
        activations = sum(sizes.values())
        del out
    return {"parameters": sum(p.numel() * p.element_size() for p in model.parameters()), "activations": activations}


def reduced_bytes(comm: Any, step: Step, x: Tensor) -> int:
    """Return the bytes of the arrays that a step all-reduces."""
    commlib.start_recording()
    step(x)
    counts = commlib.statistics()
    commlib.stop_recording()
    return sum(count.nbytes for (group, verb), count in counts.items() if verb == "all_reduce" and group == comm.name)


def measure(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    models = {
        "ours": ours(comm, arguments),
        "torch": theirs(comm, arguments),
        "computes": own_part(comm, arguments),
        "one process": block(arguments),
    }
    steps = {name: stepping(model) for name, model in models.items()}
    for tokens in map(int, arguments.tokens.split(",")):
        torch.manual_seed(1)
        x = torch.randn(1, tokens, arguments.width, requires_grad=True)
        seconds = in_turn(comm, steps, x, arguments.rounds, max(1, 256 // tokens // 4))
        rows.append(
            {
                "tokens": tokens,
                "seconds": seconds,
                "saved_bytes": {name: saved_bytes(models[name], x) for name in ("ours", "one process")},
                "reduced": reduced_bytes(comm, steps["ours"], x),
                "formula": 4 * tokens * arguments.width * 4 if comm.size > 1 else 0,
            }
        )
    return rows


def show(measured: list[dict[str, Any]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a block, forward and backward, {ranks} ranks")
    columns = ("tokens", "ours, ms", "torch, ms", "ratio", "computes, ms", "one process, ms", "speed-up", "MB stored",
               "of", "reduced, bytes", "formula")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for row in measured:
        seconds = row["seconds"]
        mid = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True))
        gain = statistics.median(a / b for a, b in zip(seconds["one process"], seconds["ours"], strict=True))
        sizes = [sum(row["saved_bytes"][name].values()) / 1e6 for name in ("ours", "one process")]
        table.add_row(
            str(row["tokens"]), f"{mid['ours']:.2f}", f"{mid['torch']:.2f}", f"{ratio:.3f}", f"{mid['computes']:.2f}",
            f"{mid['one process']:.2f}", f"{gain:.2f}", f"{sizes[0]:.1f}", f"{sizes[1]:.1f}", str(row["reduced"]),
            str(row["formula"]),
        )  # fmt: skip
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", default="1,16,64,512")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    with ExitStack() as stack:
        stack.enter_context(gloo_peer.join_gloo(MPI.COMM_WORLD, one_node=comm.one_node))
        measured = measure(comm, arguments)
    if comm.rank:
        return
    show(measured, comm.size)
    if arguments.out:
        record.write(arguments.out, "tensor", facts, arguments, block=measured)


if __name__ == "__main__":
    main()
