"""Train a byte-level GPT with tensor, context, pipeline and data parallelism, and compare with one process.

    mpirun -n 2 python examples/gpt_torch.py                # tp=2: layers are sharded
    mpirun -n 2 python examples/gpt_torch.py --cp 2 --tp 1  # sequences are sharded
    mpirun -n 4 python examples/gpt_torch.py                # dp=2, tp=2; or --pp 2, or --cp 2

The model is plain PyTorch. A plan lists the sharded layers; `mesh` has the axes, and the remaining ranks are replicas.
One process also trains the unsharded model on the same batches: losses and weights must be equal within rounding.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import commlib
import commlib_torch as ct

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS = 64, 4, 4, 33, 8, 12

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

PLAN: ct.tensor.Plan = {
    "*.words": ct.Vocabulary(),
    "*.qkv": ct.Column(parts=3, units=HEADS),
    "*.out": ct.Row(units=HEADS),
    "*.up": ct.Column(),
    "*.down": ct.Row(),
    "*.logits": ct.Vocabulary(),
}


class Embed(nn.Module):
    """An embedding of bytes, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor, position_ids: Tensor) -> Tensor:
        out: Tensor = self.words(text) + self.positions(position_ids)
        return out


class Block(nn.Module):
    """Causal attention and an MLP, each with a norm before and a residual around."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # -1: this rank's heads, because the layer may be sharded.
        heads = [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        ]
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return out


class Head(nn.Module):
    """A projection of vectors to the logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x))
        return out


class GPT(nn.Sequential):
    """A sequence of layers, which a pipeline can cut; the first one takes bytes and their positions."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(Embed(), *(Block(attend) for _ in range(LAYERS)), Head())

    def forward(self, text: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]  # two arguments
        embed, *layers = self
        x: Tensor = embed(text, position_ids)
        for layer in layers:
            x = layer(x)
        return x


def make_model(attend: Attend) -> GPT:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return GPT(attend)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return windows of the source of Python's standard library, and the next byte of each of their bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(stream) - CONTEXT, (STEPS, ROWS), generator=torch.Generator().manual_seed(1))
    windows = stream[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)]
    return [(window[:, :-1], window[:, 1:].contiguous()) for window in windows]


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def in_one_process(batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], nn.Module]:
    model = make_model(partial(functional.scaled_dot_product_attention, is_causal=True))
    optimizer = optimizer_of(model.parameters())
    losses = []
    for x, y in batches:
        logits = model(x, torch.arange(CONTEXT).expand_as(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class ParallelTraining:
    """The same training, run on all ranks of a mesh."""

    def __init__(self, mesh: commlib.Mesh) -> None:
        self.mesh = mesh
        attend = partial(ct.context.attention, ranks=mesh["cp"], causal=True)
        model = ct.parallelize(make_model(attend), mesh["tp"], PLAN)
        self.is_staged = mesh["pp"].size > 1
        self.model: Any = model
        if self.is_staged:
            self.model = ct.pipeline(model, mesh["pp"], schedule="1f1b", microbatches=2, loss=self.loss)
        self.optimizer = ct.DistributedOptimizer(
            optimizer_of(self.model.parameters()), self.model.named_parameters(), mesh=mesh
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the tokens of all shards of the sequences."""
        total = ct.vocabulary_cross_entropy(logits, targets, self.mesh["tp"], reduction="sum")
        return ct.context.loss_mean(total, targets.numel(), self.mesh["cp"])

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on this rank's rows and tokens of a batch; return the loss of these rows."""
        replicas, place, cp = self.mesh.shape.size("dp"), self.mesh.coordinate("dp"), self.mesh["cp"]
        x, y = (ct.context.shard_sequence(part.chunk(replicas)[place], cp).contiguous() for part in (x, y))
        position_ids = ct.context.position_ids(CONTEXT, cp).expand_as(x)
        if self.is_staged:
            loss = self.model.step((x, position_ids), y)
            self.model.clip_grad_norm(1.0)
        else:
            loss = self.loss(self.model(x, position_ids), y)
            loss.backward()
            self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Return the state of the unsharded model."""
        result: dict[str, Tensor] = (
            self.model.gather_state_dict() if self.is_staged else ct.gather_state_dict(self.model)
        )
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, size in (("pp", 1), ("cp", 1), ("tp", 2)):
        parser.add_argument(f"--{axis}", type=int, default=size)
    arguments = parser.parse_args()
    comm = commlib.init()
    torch.set_num_threads(1)
    mesh = commlib.Mesh(pp=arguments.pp, dp=-1, cp=arguments.cp, tp=arguments.tp)
    if comm.rank == 0:
        print(mesh.picture())
    text = batches()
    training = ParallelTraining(mesh)
    losses = []
    for x, y in text:
        own = training.step(x, y)
        losses.append(float(sum(mesh["dp"].all_gather_object(own))) / mesh["dp"].size)

    expected, model = in_one_process(text)
    full = training.state()
    # float32: another order of sums changes a loss by some 1e-7, and a weight by more after 12 steps of Adam.
    loss_gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    weight_gap = max(float((full[name] - value).abs().max()) for name, value in model.state_dict().items())
    if loss_gap > 1e-4 or weight_gap > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"rank {comm.rank}: losses differ by {loss_gap}, weights by {weight_gap}: {losses} {expected}")
    if comm.rank == 0:
        print(f"{mesh.shape}: loss {losses[0]:.3f} to {losses[-1]:.3f}, as in one process")
        print(f"(losses differ by {loss_gap:.1e} at most, weights by {weight_gap:.1e})")


if __name__ == "__main__":
    main()
