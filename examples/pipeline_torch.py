"""Train a byte-level transformer in stages, save it, and go on with another number of stages and with replicas.

    mpirun -n 2 python examples/pipeline_torch.py
    mpirun -n 4 python examples/pipeline_torch.py    # as root, or on fewer cores: see ci/env.sh

The model and the loop are plain PyTorch; `ct.pipeline` puts a stage on each rank. After some steps the whole model and
the optimizer's state are saved under the names that they have in one process, and loaded into half as many stages, of
which there are two replicas then. Beside it one process trains on the same batches: losses and weights must be alike.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import commlib
import commlib_torch as ct

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS = 64, 4, 4, 32, 16, 10


class Embed(nn.Module):
    """Bytes to vectors, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.bytes(text) + self.places.weight
        return out


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        heads = self.qkv(self.norms[0](x)).view(rows, CONTEXT, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, CONTEXT, WIDTH))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


def make_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    return nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), head)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Windows of the source of Python's own standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(stream) - CONTEXT, (2 * STEPS, ROWS), generator=torch.Generator().manual_seed(1))
    windows = stream[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)]
    return [(window[:, :-1], window[:, 1:].contiguous()) for window in windows]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def in_one_process(batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], nn.Module]:
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    losses = []
    for x, y in batches:
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def main() -> None:
    comm = commlib.init()
    torch.set_num_threads(1)
    text = batches()

    # A stage on each rank.
    pipe = ct.pipeline(make_model(), comm, schedule="1f1b", microbatches=4, loss=loss_of)
    optimizer = optimizer_of(pipe.parameters())
    losses = []
    for x, y in text[:STEPS]:
        losses.append(pipe.step(x, y).item())
        pipe.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if comm.rank == 0:
        print(pipe.picture())

    # Save the whole.
    saved = {"model": pipe.gather_state_dict(), "optimizer": pipe.gather_optimizer_state(optimizer)}
    folder = comm.broadcast_object(tempfile.mkdtemp())
    if comm.rank == 0:
        torch.save(saved, f"{folder}/step-{STEPS}.pt")
    comm.barrier()
    pipe.close()

    # Go on with half as many stages, of which each is there twice.
    mesh = commlib.Mesh(pp=comm.size // 2, dp=2)
    pipe = ct.pipeline(make_model(), mesh["pp"], schedule="zb_h1", microbatches=2, loss=loss_of)
    optimizer = ct.DistributedOptimizer(optimizer_of(pipe.parameters()), pipe.named_parameters(), mesh=mesh)
    loaded = torch.load(f"{folder}/step-{STEPS}.pt")
    pipe.load_state_dict(loaded["model"])
    pipe.load_optimizer_state(optimizer, loaded["optimizer"])
    replica = mesh.coordinate("dp")
    for x, y in text[STEPS:]:
        loss = pipe.step(x.chunk(2)[replica], y.chunk(2)[replica])  # of this replica's half of the batch
        losses.append(sum(comm.all_gather_object(loss.item())) / comm.size)
        pipe.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    expected, model = in_one_process(text)
    whole = pipe.gather_state_dict()
    # float32: sums of microbatches in another order, some 1e-7 of a loss and more of a weight after 20 steps of Adam.
    worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    apart = max(float((whole[name] - value).abs().max()) for name, value in model.state_dict().items())
    if worst > 1e-4 or apart > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"rank {comm.rank}: losses differ by {worst}, weights by {apart}: {losses} {expected}")
    if comm.rank == 0:
        first, last = f"{losses[0]:.3f}", f"{losses[-1]:.3f}"
        print(f"{comm.size} stages, then {comm.size // 2} x 2 replicas: loss {first} to {last}, as in one process")
        print(f"(losses differ by {worst:.1e} at most, weights by {apart:.1e})")


if __name__ == "__main__":
    main()
