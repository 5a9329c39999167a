"""A decoder-only transformer as one writes it in PyTorch, and its batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.bench.steps.contract import Sizes, Step

Batch = tuple[Tensor, Tensor]


class Embed(nn.Module):
    """Tokens to vectors, with learned positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Parameter(0.02 * torch.randn(sizes.context, sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (rows, context, width)."""
        out: Tensor = self.words(tokens) + self.places
        return out


class MLP(nn.Sequential):
    """The perceptron of a block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """Attention and a perceptron; with parts, what one of so many ranks has of them."""

    def __init__(self, sizes: Sizes, parts: int = 1) -> None:
        super().__init__()
        width = sizes.width
        self.head = width // sizes.heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width // parts) for _ in range(3))
        self.out = nn.Linear(width // parts, width)
        self.mlp = MLP(width, 4 * width // parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes in, and what the block adds to it."""
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Head(nn.Sequential):
    """Vectors to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary))


def transformer(sizes: Sizes, parts: int = 1) -> nn.Sequential:
    """Return the model, the same on every rank: its layers are a sequence."""
    torch.manual_seed(0)
    return nn.Sequential(Embed(sizes), *(Block(sizes, parts) for _ in range(sizes.layers)), Head(sizes))


def batch_of(sizes: Sizes, rank: int) -> Batch:
    """Return a batch of random tokens, and those that follow them."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(sizes.vocabulary, (sizes.rows, sizes.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def joined(sizes: Sizes, ranks: int) -> Batch:
    """Return the batches of all ranks as one."""
    inputs, targets = zip(*(batch_of(sizes, rank) for rank in range(ranks)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every contender."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, more: Callable[[], Tensor] | None = None
) -> Step:
    """Return a step of training. more: another loss, which is added and not returned."""
    inputs, targets = batch

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        (loss if more is None else loss + more()).backward()
        optimizer.step()
        return float(loss.detach())

    return step


def count(model: nn.Module) -> int:
    """Return how many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())
