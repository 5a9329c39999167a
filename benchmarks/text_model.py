"""A small byte-level transformer in plain PyTorch, and its training text: for benchmarks and tests of training.

The text is the source of Python's standard library, so nothing is downloaded. It differs a little between versions of
Python: compare losses within one run only.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes
TEXT_BYTES = 2 << 20
VALIDATION_SHARE = 0.1
VALIDATION = -1  # the step number of validation batches

Text = npt.NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of a model. About 12 * layers * width**2 + 512 * width parameters."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Attention and an MLP, each with a layer norm before and a residual around."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, length, width))
        perceived: Tensor = self.narrow(functional.gelu(self.widen(self.norm_mlp(x))))
        return x + perceived


class Transformer(nn.Module):
    """A decoder with learned positions: (rows, length) bytes as int64 to (rows, length, 256) logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, sizes.width), nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm, self.logits = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY)
        for embedding in (self.embed, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place.weight[: text.shape[1]]
        logits: Tensor = self.logits(self.norm(self.blocks(x)))
        return logits


def make_model(sizes: Sizes, seed: int = 0) -> Transformer:
    """Return a model, the same for the same seed; torch's global random state is unchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(sizes)


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def load_text(nbytes: int = TEXT_BYTES) -> tuple[Text, Text]:
    """Return training and validation text: together the first `nbytes` of the standard library.

    Raises FileNotFoundError if Python has less source than that (if it is a zip file, or bytecode only).
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= nbytes:
            break
    else:
        raise FileNotFoundError(f"expected {nbytes} bytes of *.py in {folder}, found {len(text)}")
    cut = int(nbytes * (1 - VALIDATION_SHARE))
    array = np.frombuffer(bytes(text[:nbytes]), np.uint8)
    return array[:cut], array[cut:]


def batch_of(text: Text, rows: int, context: int, *, seed: int, rank: int, step: int) -> Batch:
    """Return inputs and targets, (rows, context) each, drawn by seed, rank and step (or VALIDATION) alone."""
    starts = np.random.default_rng([seed, rank, step - VALIDATION]).integers(len(text) - context, size=rows)
    windows = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return windows[:, :-1], windows[:, 1:].contiguous()
