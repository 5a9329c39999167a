"""Pairs of axes in a mesh of 2 x 2 train a transformer as one process does, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Mesh
from commlib_torch import (
    Column,
    DistributedOptimizer,
    Row,
    Vocabulary,
    context,
    gather_state_dict,
    parallelize,
    pipeline,
    vocabulary_cross_entropy,
)

WORDS, WIDTH, SIZE, HEADS, TOKENS, ROWS = 13, 8, 3, 3, 7, 4  # odd heads, words and tokens

Attend = Callable[..., Tensor]

pytestmark = pytest.mark.ranks(min=4, max=4)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, text: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.words(text) + self.places(places)
        return out


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(HEADS * SIZE, WIDTH), nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = [layer(h).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x))
        return out


def layers(attend: Attend) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Embed(), Block(attend), Block(attend), Head()]).double()


def run(model: Any, text: Tensor, places: Tensor) -> Tensor:
    embed, *others = model
    x: Tensor = embed(text, places)
    for layer in others:
        x = layer(x)
    return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:].contiguous()


def alone(steps: int) -> tuple[list[float], nn.Module]:
    model = layers(partial(F.scaled_dot_product_attention, is_causal=True))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        logits = run(model, x, torch.arange(TOKENS).expand_as(x))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


PLAN: Any = {
    "*.words": Vocabulary(), "*.[qkv]": Column(units=HEADS), "*.out": Row(units=HEADS), "*.up": Column(),
    "*.down": Row(), "*.logits": Vocabulary(),
}  # fmt: skip


@pytest.mark.parametrize("axes", ["dp tp", "pp tp", "cp tp", "pp cp", "dp cp", "pp dp"])
def test_pairs(comm: Any, axes: str) -> None:
    sizes: Any = {axis: 2 if axis in axes.split() else 1 for axis in ("pp", "dp", "cp", "tp")}
    mesh = Mesh(**sizes)
    cp, dp = mesh["cp"], mesh["dp"]
    model: Any = parallelize(layers(partial(context.attention, ranks=cp, causal=True)), mesh["tp"], PLAN)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        total = vocabulary_cross_entropy(logits, targets, mesh["tp"], reduction="sum", label_smoothing=0.1)
        return context.loss_mean(total, targets.numel(), cp)

    staged = mesh["pp"].size > 1
    passes = 2 if axes == "dp cp" else 1  # gradients of several backwards accumulate
    if staged:
        model = pipeline(model, mesh["pp"], schedule="1f1b", microbatches=2, loss=loss_of)
    optimizer: Any = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.01), model.named_parameters(), mesh=mesh,
        backward_passes_per_step=passes,
    )  # fmt: skip
    expected, whole = alone(3)
    for step, loss_alone in enumerate(expected):
        x, y = (context.shard_sequence(part.chunk(dp.size)[dp.rank], cp).contiguous() for part in batch(step))
        places = context.position_ids(TOKENS, cp).expand_as(x)
        optimizer.zero_grad()
        if staged:
            loss = model.step((x, places), y)
            model.clip_grad_norm(0.5)
        else:
            parts = zip(x.chunk(passes), places.chunk(passes), y.chunk(passes), strict=True)
            loss = torch.zeros((), dtype=torch.float64)
            for text, at, targets in parts:
                part = loss_of(run(model, text, at), targets) / passes
                part.backward()
                loss += part.detach()
            optimizer.clip_grad_norm(0.5)
        optimizer.step()
        mean = sum(dp.all_gather_object(loss.item())) / dp.size
        assert mean == pytest.approx(loss_alone, rel=1e-11)
    state = model.gather_state_dict() if staged else gather_state_dict(model)
    torch.testing.assert_close(state, dict(whole.state_dict()), rtol=1e-9, atol=1e-10)  # Adam divides by small roots
