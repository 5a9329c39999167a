"""Pairs of features without another test: training matches one process without these features.

docs/composition.py names these tests in its tables.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import commlib_torch as ct
from commlib import Mesh

from .oracle import assert_same_everywhere

WIDTH, HEADS, TOKENS, STEPS = 8, 2, 8, 3
ROUNDING = 0.03
"""bfloat16 has 8 bits; three roundings of weights of about 1."""

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and an MLP, or experts. cp: the communicator over which sequences are sharded."""

    def __init__(self, cp: Any, experts: Any, recompute: bool) -> None:
        super().__init__()
        self.cp, self.recompute = cp, recompute
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        # A capacity and a balance per sequence would depend on how sequences are sharded.
        options = ct.Experts(4, top_k=2, hidden=6, balance="global")
        self.mlp: Any = nn.Linear(WIDTH, WIDTH) if experts is None else ct.MoE(WIDTH, options, experts)

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.cp is None:
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            heads = ct.context.attention(q, k, v, self.cp, causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        out: Tensor = x + torch.tanh(self.mlp(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        return out


def make(dtype: torch.dtype, cp: Any = None, experts: Any = None, recompute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(cp, experts, recompute) for _ in range(2))).to(dtype)


def batch(rows: int, step: int, dtype: torch.dtype) -> Batch:
    x, y = torch.randn(2, rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def train(called: Any, optimizer: Any, scaler: Any, batches: list[Batch], amp: bool, loss_of: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = loss_of(called(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def alone(comm: Any, rows: int, dtype: torch.dtype, amp: bool, experts: bool) -> dict[str, Tensor]:
    """Train in one process, without axes, recomputation, compilation or compression."""
    model = make(dtype, experts=comm.split(comm.rank, name="alone") if experts else None)
    batches = [batch(rows, step, dtype) for step in range(STEPS)]

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out.to(y.dtype), y)
        return loss + ct.auxiliary_loss(model) if experts else loss

    train(model, sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0), batches, amp, loss_of)
    return model.state_dict()


PAIRS = [
    "dp amp", "cp ep", "cp compression", "cp amp", "ep compression", "ep compile", "compression amp",
    "compression recompute", "compression compile", "amp recompute", "amp compile", "recompute compile",
]  # fmt: skip


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs(comm: Any, pair: str) -> None:
    if comm.size % 2:
        pytest.skip("4 experts, and sequences sharded among 2 ranks")
    features = pair.split()
    amp, compresses, compiles = ("amp" in features, "compression" in features, "compile" in features)
    dtype = torch.float32 if amp or compresses else torch.float64
    torch.compiler.reset()
    mesh = Mesh(dp=-1, cp=2 if "cp" in features else 1)
    dp, cp = mesh["dp"], mesh["cp"]
    experts = "ep" in features
    model = make(dtype, cp if cp.size > 1 else None, mesh if experts else None, "recompute" in features)
    graphs: list[Any] = []
    forwards: list[Any] = []
    if not compiles:  # the compiler breaks graphs at this hook
        model[0].qkv.register_forward_hook(lambda *_: forwards.append(1))  # type: ignore[union-attr]

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    called: Any = torch.compile(model, backend=backend) if compiles else model
    options: dict[str, Any] = {"compression": "bf16", "compress_within_node": True} if compresses else {}
    optimizer: Any = ct.DistributedOptimizer(sgd(model), model.named_parameters(), mesh=mesh, **options)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out.to(y.dtype), y)  # shards of sequences have equal lengths here
        return loss + ct.auxiliary_loss(model) if experts else loss

    def own(each: Tensor) -> Tensor:
        return ct.context.shard_sequence(each.chunk(dp.size)[dp.rank], cp).contiguous()

    rows = 2 * dp.size
    whole = [batch(rows, step, dtype) for step in range(STEPS)]
    scaler = (
        ct.GradScaler(ranks=mesh, init_scale=8.0) if amp or experts else torch.amp.GradScaler("cpu", init_scale=8.0)
    )
    train(called, optimizer, scaler, [(own(x), own(y)) for x, y in whole], amp, loss_of)
    result = ct.gather_state_dict(model)
    expected = alone(comm, rows, dtype, amp, experts)
    # Gates of experts are float32.
    tolerance = ROUNDING if amp or compresses else 2e-5 if experts else 1e-9
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    if amp or compresses:  # check that they had an effect
        exact = alone(comm, rows, torch.float64, False, experts)
        assert any((result[name] - exact[name]).abs().max() > 1e-5 for name in exact)
    assert bool(graphs) == compiles
    assert compiles or len(forwards) == STEPS * (2 if "recompute" in features else 1)
    assert_same_everywhere(comm, list(result.values()))
    mesh.close()


@pytest.mark.ranks(min=2)
def test_stages_under_autocast(comm: Any) -> None:
    """pp and amp: stages compute in bfloat16 and agree on the scale of the loss."""
    torch.manual_seed(0)
    layers: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)))
    whole = copy.deepcopy(layers)
    pipe = ct.pipeline(layers, comm, microbatches=2, loss=F.mse_loss)
    ours, theirs = sgd(pipe), sgd(whole)
    scaler, single = ct.GradScaler(ranks=comm, init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        ours.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, y, scale=scaler.get_scale())
        scaler.scale(torch.zeros(()))
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(whole(x), y)
        single.scale(loss).backward()
        for each, stepping in ((scaler, ours), (single, theirs)):
            each.step(stepping)
            each.update()
    result = pipe.gather_state_dict()
    torch.testing.assert_close(result, whole.state_dict(), rtol=ROUNDING, atol=ROUNDING)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert whole(x).dtype == torch.bfloat16
    pipe.close()
