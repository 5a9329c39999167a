"""A plain decoder-only transformer in PyTorch, and its batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.bench.steps.contract import Step, StepSizes

Batch = tuple[Tensor, Tensor]


class Embed(nn.Module):
    """Token embedding with learned positions."""

    def __init__(self, sizes: StepSizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Parameter(0.02 * torch.randn(sizes.context, sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (rows, context, width)."""
        out: Tensor = self.words(tokens) + self.places
        return out


class BlockMLP(nn.Sequential):
    """The MLP of a block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class TransformerBlock(nn.Module):
    """Attention and an MLP; with parts, the share of one of so many ranks."""

    def __init__(self, sizes: StepSizes, parts: int = 1) -> None:
        super().__init__()
        width = sizes.width
        self.head = width // sizes.heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width // parts) for _ in range(3))
        self.out = nn.Linear(width // parts, width)
        self.mlp = BlockMLP(width, 4 * width // parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream with the block's output added."""
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class LogitHead(nn.Sequential):
    """The layer that computes logits."""

    def __init__(self, sizes: StepSizes) -> None:
        super().__init__(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary))


def transformer(sizes: StepSizes, parts: int = 1) -> nn.Sequential:
    """Return the model, equal on every rank: a sequence of layers."""
    torch.manual_seed(0)
    return nn.Sequential(Embed(sizes), *(TransformerBlock(sizes, parts) for _ in range(sizes.layers)), LogitHead(sizes))


def batch_of(sizes: StepSizes, rank: int) -> Batch:
    """Return a batch of random tokens, and the next tokens."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(sizes.vocabulary, (sizes.rows, sizes.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def join_batches(sizes: StepSizes, ranks: int) -> Batch:
    """Join the batches of all ranks."""
    inputs, targets = zip(*(batch_of(sizes, rank) for rank in range(ranks)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all contenders use."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, more: Callable[[], Tensor] | None = None
) -> Step:
    """Return a training step. more: another loss, which is added for the backward but not returned."""
    inputs, targets = batch

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        (loss if more is None else loss + more()).backward()
        optimizer.step()
        return float(loss.detach())

    return step


def count(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
