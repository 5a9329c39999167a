"""Train a byte-level transformer in stages, save it, and continue with another number of stages and with replicas.

    mpirun -n 2 python examples/pipeline_torch.py
    mpirun -n 4 python examples/pipeline_torch.py    # as root, or on fewer cores: see ci/env.sh

The model and the loop are plain PyTorch; `ct.pipeline` puts a stage on each rank. After some steps the full model and
the optimizer's state are saved under their names in one process, and loaded into half as many stages with two replicas.
One process also trains on the same batches: losses and weights must be equal within rounding.
"""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import commlib
import commlib_torch as ct

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS = 64, 4, 4, 32, 16, 10


class Embed(nn.Module):
    """An embedding of bytes, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.bytes(text) + self.positions.weight
        return out


class Block(nn.Module):
    """Causal attention and an MLP, each with a norm before and a residual around."""

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
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    return nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), head)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return windows of the source of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(stream) - CONTEXT, (2 * STEPS, ROWS), generator=torch.Generator().manual_seed(1))
    windows = stream[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)]
    return [(window[:, :-1], window[:, 1:].contiguous()) for window in windows]


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
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

    # Save the full model.
    saved = {"model": pipe.gather_state_dict(), "optimizer": pipe.gather_optimizer_state(optimizer)}
    folder = comm.broadcast_object(tempfile.mkdtemp())
    if comm.rank == 0:
        torch.save(saved, f"{folder}/step-{STEPS}.pt")
    comm.barrier()
    pipe.close()

    # Continue with half as many stages, with two replicas of each.
    mesh = commlib.Mesh(pp=comm.size // 2, dp=2)
    pipe = ct.pipeline(make_model(), mesh["pp"], schedule="zb_h1", microbatches=2, loss=loss_of)
    optimizer = ct.DistributedOptimizer(optimizer_of(pipe.parameters()), pipe.named_parameters(), mesh=mesh)
    loaded = torch.load(f"{folder}/step-{STEPS}.pt")
    pipe.load_state_dict(loaded["model"])
    pipe.load_optimizer_state(optimizer, loaded["optimizer"])
    replica = mesh.coordinate("dp")
    for x, y in text[STEPS:]:
        loss = pipe.step(x.chunk(2)[replica], y.chunk(2)[replica])  # on this replica's half of the batch
        losses.append(sum(comm.all_gather_object(loss.item())) / comm.size)
        pipe.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    expected, model = in_one_process(text)
    full = pipe.gather_state_dict()
    # float32: another order of sums over microbatches changes a loss by some 1e-7, and a weight by more (Adam).
    loss_gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    weight_gap = max(float((full[name] - value).abs().max()) for name, value in model.state_dict().items())
    if loss_gap > 1e-4 or weight_gap > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"rank {comm.rank}: losses differ by {loss_gap}, weights by {weight_gap}: {losses} {expected}")
    if comm.rank == 0:
        first, last = f"{losses[0]:.3f}", f"{losses[-1]:.3f}"
        print(f"{comm.size} stages, then {comm.size // 2} x 2 replicas: loss {first} to {last}, as in one process")
        print(f"(losses differ by {loss_gap:.1e} at most, weights by {weight_gap:.1e})")


if __name__ == "__main__":
    main()
