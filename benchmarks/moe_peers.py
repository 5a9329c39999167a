"""The contenders of benchmarks/moe.py: hand-written mixtures of experts on torch.distributed, and dense MLPs.

An expert is two linear layers with biases and a gelu in between; a router is the softmax of a linear layer without a
bias. Each rank has neighbouring experts. Tokens are [tokens, width], one sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

BALANCE_WEIGHT = 0.01


class MLP(nn.Module):
    """An expert, or the dense layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class AllToAllRows(Function):
    """An all-to-all of rows: sends `splits[0]` and receives `splits[1]` rows; in backward the other way around."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: tuple[list[int], list[int]]) -> Tensor:
        ctx.splits = splits
        return exchanged(rows, *splits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        splits, takes = ctx.splits
        return exchanged(gradient.contiguous(), takes, splits), None


def exchanged(rows: Tensor, splits: list[int], takes: list[int]) -> Tensor:
    out = rows.new_empty(sum(takes), *rows.shape[1:])
    dist.all_to_all_single(out, rows, takes, splits)
    return out


class ManualMoE(nn.Module):
    """A dropless mixture: sorts tokens by expert, exchanges counts, sends rows to experts and back."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.ranks, self.top_k, self.count = dist.get_world_size(), top_k, experts
        self.local = experts // self.ranks
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, hidden) for _ in range(self.local))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the load-balancing loss."""
        shares = torch.softmax(self.router(x.float()), -1)
        gates, chosen = shares.topk(self.top_k)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        tokens = order // self.top_k
        counts = torch.bincount(expert, minlength=self.count)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        splits = counts.view(self.ranks, -1).sum(1).tolist()
        segments = incoming.view(self.ranks, -1)
        takes = segments.sum(1).tolist()
        parts = AllToAllRows.apply(x.index_select(0, tokens), (splits, takes)).split(incoming.tolist())  # type: ignore[no-untyped-call]
        each = [
            expert(torch.cat(parts[e :: self.local])).split(segments[:, e].tolist())
            for e, expert in enumerate(self.experts)
        ]
        out = torch.cat([each[e][rank] for rank in range(self.ranks) for e in range(self.local)])
        back = AllToAllRows.apply(out, (takes, splits))  # type: ignore[no-untyped-call]

        weighted = back * gates.flatten().index_select(0, order).unsqueeze(1)
        y = torch.zeros_like(x).index_add(0, tokens, weighted)
        often = counts / (len(x) * self.top_k)
        return y, BALANCE_WEIGHT * self.count * (often * shares.mean(0)).sum()


class OneHotMoE(nn.Module):
    """A mixture with a capacity, as in GShard and DeepSpeed: masks [tokens, experts, capacity] move tokens.

    The masks are factors of matrix products. Capacities are equal, so no counts are exchanged, and tokens beyond the
    capacity are dropped.
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int, factor: float) -> None:
        super().__init__()
        self.ranks, self.top_k, self.count, self.factor = dist.get_world_size(), top_k, experts, factor
        self.local = experts // self.ranks
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, hidden) for _ in range(self.local))
        self.dropped = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the load-balancing loss."""
        capacity = max(4, math.ceil(self.factor * self.top_k * len(x) / self.count))
        shares = torch.softmax(self.router(x.float()), -1)
        chosen = shares.topk(self.top_k).indices
        masks, places, filled = [], [], shares.new_zeros(self.count)
        for j in range(self.top_k):
            mask = F.one_hot(chosen[:, j], self.count).to(shares.dtype)
            place = mask.cumsum(0) - 1 + filled
            filled = filled + mask.sum(0)
            masks.append(mask * (place < capacity))
            places.append(place)
        gates = [(shares * mask).sum(-1) for mask in masks]
        if self.top_k > 1:
            total = torch.stack(gates).sum(0).clamp(min=torch.finfo(shares.dtype).eps)
            gates = [gate / total for gate in gates]
        combine = torch.zeros(())
        for mask, place, gate in zip(masks, places, gates, strict=True):
            slot = F.one_hot((place * mask).sum(-1).long(), capacity).to(x.dtype)
            combine = combine + torch.einsum("se,sc->sec", gate.unsqueeze(1) * mask, slot)
        dispatch = combine.bool().to(x.dtype)
        self.dropped = 1 - float(sum(mask.detach().sum() for mask in masks)) / (len(x) * self.top_k)

        equal = [self.count // self.ranks] * self.ranks, [self.count // self.ranks] * self.ranks
        slots = torch.einsum("sec,sm->ecm", dispatch, x)
        received = AllToAllRows.apply(slots, equal).view(self.ranks, self.local, capacity, -1)  # type: ignore[no-untyped-call]
        each = [expert(received[:, e].reshape(self.ranks * capacity, -1)) for e, expert in enumerate(self.experts)]
        out = torch.stack([one.view(self.ranks, capacity, -1) for one in each], 1).flatten(0, 1)
        back = AllToAllRows.apply(out, equal)  # type: ignore[no-untyped-call]
        y = torch.einsum("sec,ecm->sm", combine, back)
        often = torch.bincount(chosen.flatten(), minlength=self.count) / (len(x) * self.top_k)
        return y, BALANCE_WEIGHT * self.count * (often * shares.mean(0)).sum()


class Dense(MLP):
    """An MLP with the same computation per token, without a load-balancing loss."""

    def forward(self, x: Tensor) -> Any:
        """Return the outputs, and no loss."""
        return super().forward(x), torch.zeros(())


def load(model: Any, router: Tensor, parameters: dict[str, Tensor]) -> None:
    """Copy the values of another model: its router, and the stacks [local experts, ...] of its experts' parameters."""
    with torch.no_grad():
        model.router.weight.copy_(router)
        for e, expert in enumerate(model.experts):
            expert.load_state_dict({name: values[e] for name, values in parameters.items()})


def products(counts: list[int], width: int, hidden: int) -> Any:
    """Return a function that runs only the matrix products of a step, for experts with these numbers of rows."""
    up, down = torch.randn(len(counts), hidden, width), torch.randn(len(counts), width, hidden)
    of_up, of_down = torch.empty_like(up), torch.empty_like(down)
    x, of_x = (torch.randn(sum(counts), width) for _ in range(2))
    inside, of_inside = (torch.randn(sum(counts), hidden) for _ in range(2))
    y = torch.empty_like(x)
    parts = [[one.split(counts) for one in group] for group in ((x, of_x, y), (inside, of_inside))]
    (xs, of_xs, ys), (insides, of_insides) = parts

    def run() -> None:
        for e in range(len(counts)):
            torch.mm(xs[e], up[e].t(), out=insides[e])
        for e in range(len(counts)):
            torch.mm(insides[e], down[e].t(), out=ys[e])
        for e in range(len(counts)):
            torch.mm(ys[e], down[e], out=of_insides[e])
            torch.mm(ys[e].t(), insides[e], out=of_down[e])
        for e in range(len(counts)):
            torch.mm(of_insides[e], up[e], out=of_xs[e])
            torch.mm(of_insides[e].t(), xs[e], out=of_up[e])

    return run
