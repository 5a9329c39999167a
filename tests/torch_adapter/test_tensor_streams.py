"""Random streams of PyTorch over an axis, with recomputation and compiled models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence, Vocabulary
from commlib_torch.tensor import ParallelAttention, parallelize, scatter, streams, vocabulary_cross_entropy
from tests.torch_adapter.dividing import assert_equal, own_head, random


@pytest.fixture(scope="module")
def mesh(comm):
    return commlib.Mesh(tp=comm.size)


@pytest.fixture(scope="module")
def tp(mesh):
    return mesh["tp"]


def everyone(axis: Any, x: Tensor) -> list[Any]:
    """Return the tensors of all ranks."""
    return list(axis.all_gather_object(x.detach().tolist()))


def test_seed(comm):
    """Seeds are equal along tp, and differ along all other axes."""
    two = 2 if comm.size % 2 == 0 else 1
    mesh = commlib.Mesh(dp=comm.size // two, tp=two)
    seeds = comm.all_gather_object((mesh.shape.coordinates(comm.rank)["dp"], streams.seed(mesh, 7)))
    assert len(set(seeds)) == comm.size // two
    assert len({seed for _, seed in seeds}) == comm.size // two
    drawn = everyone(mesh["tp"], torch.rand(3))
    assert all(other == drawn[0] for other in drawn)
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError, match="non-negative integer"):
            streams.seed(mesh, wrong)  # type: ignore[arg-type]


def test_a_stream_for_each_rank(mesh, tp):
    streams.seed(mesh, 1)
    first, second = (everyone(tp, torch.rand(4, generator=streams.draw(tp))) for _ in range(2))
    drawn = [tuple(row) for row in (*first, *second)]
    assert len(set(drawn)) == 2 * tp.size  # different on each rank, and in each call
    shared = everyone(tp, torch.rand(4))
    assert all(other == shared[0] for other in shared)
    streams.seed(mesh, 1)
    assert everyone(tp, torch.rand(4, generator=streams.draw(tp))) == first


def test_the_shared_stream_advances_equally(mesh, tp):
    """It does so even if the shards of ranks differ in length."""
    streams.seed(mesh, 2)
    streams.dropout(torch.ones(5 + tp.rank, 3), 0.5, True, tp)
    streams.dropout(torch.ones(0 if tp.rank else 3), 0.5, True, tp)
    with pytest.raises(ZeroDivisionError), streams.divided(tp):
        torch.rand(tp.rank)
        1 / 0  # noqa: B018
    shared = everyone(tp, torch.rand(4))
    assert all(other == shared[0] for other in shared)


def test_dropout(mesh, tp):
    streams.seed(mesh, 3)
    x = torch.ones(40, 50, requires_grad=True)
    out = streams.dropout(x, 0.3, True, tp)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    kept = out.detach() != 0
    torch.testing.assert_close(out.detach()[kept], torch.full((int(kept.sum()),), 1 / 0.7))
    assert abs(float(kept.float().mean()) - 0.7) < 0.05
    masks = everyone(tp, kept)
    assert all(one != other for at, one in enumerate(masks) for other in masks[:at])
    assert streams.dropout(x, 0.3, False, tp) is x
    assert streams.dropout(x, 0.0, True, tp) is x
    assert not streams.dropout(x, 1.0, True, tp).any()


KINDS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU]


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_all_kinds(mesh, tp, kind):
    """Masks differ among ranks for a divided tensor, and are the same for a whole one."""
    plain = kind()
    divided = parallelize(copy.deepcopy(plain), tp, {"": Sequence(0)})
    assert isinstance(divided, kind)
    x = -torch.ones(3, 64, *(2,) * {nn.Dropout1d: 1, nn.Dropout3d: 3}.get(kind, 2))
    streams.seed(mesh, 4)
    for layer, is_same in ((divided, False), (plain, True), (copy.deepcopy(divided), False)):
        drawn = everyone(tp, layer(x))
        assert all((other == drawn[0]) is is_same for other in drawn[1:])
    assert divided(input=x).shape == x.shape
    divided.eval()
    before = torch.get_rng_state()
    torch.testing.assert_close(divided(x), plain.eval()(x))
    assert torch.equal(torch.get_rng_state(), before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 4, 0.2, batch_first=True)
        self.up, self.inner, self.down = nn.Linear(8, 12), nn.Dropout(0.3), nn.Linear(12, 8)
        self.outer = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.outer(self.attention(y, y, y, need_weights=False)[0])
        out: Tensor = x + self.outer(self.down(self.inner(self.up(x).relu())))
        return out


def plan_of(sequence: int | None) -> Plan:
    plan: Plan = {
        "*attention": Column(sequence=sequence), "*up": Column(sequence=sequence), "*inner": Sequence(-1),
        "*down": Row(sequence=sequence),
    }  # fmt: skip
    return plan if sequence is None else {**plan, "*norm": Sequence(sequence), "*outer": Sequence(sequence)}


def block(tp: Any, sequence: int | None = None) -> Any:
    torch.manual_seed(6)
    return parallelize(Block().double(), tp, plan_of(sequence))


@pytest.mark.parametrize("sequence", [None, 1])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same(mesh, tp, reentrant, sequence):
    model = block(tp, sequence)
    gradients = []
    for recompute in (False, True):
        streams.seed(mesh, 8)
        model.zero_grad()
        x = random(2, 6, 8)
        x = (x if sequence is None else own_head(tp, sequence)(x)).clone().requires_grad_()
        out = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
        torch.rand(3)  # the stream advances before the recomputation
        out.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(got, expected)


def test_whole_tensors_stay_equal(mesh, tp):
    """All ranks drop the same elements of whole tensors, so the residual stream has the same bits everywhere."""
    model = block(tp)
    streams.seed(mesh, 9)
    for _ in range(2):
        out = everyone(tp, model(random(2, 6, 8)))
        assert all(other == out[0] for other in out)


def test_dropout_within_attention(mesh, tp):
    """Each head has its own mask; the average is the attention without dropout."""
    torch.manual_seed(5)
    layer = ParallelAttention(8, 4, tp, dropout=0.5).double()
    x = random(1, 5, 8)
    streams.seed(mesh, 10)
    with torch.no_grad():
        mean = torch.stack([layer(x) for _ in range(800)]).mean(0)
        torch.testing.assert_close(mean, layer.eval()(x), rtol=0, atol=0.06)
        attention: Any = parallelize(nn.MultiheadAttention(8, 4, 0.5), tp, {"": Column()})
        _, weights = attention(*(x.float(),) * 3, average_attn_weights=False)
        heads = [tuple((head == 0).flatten().tolist()) for head in weights.flatten(0, 1)]
    assert len(set(heads)) > 1
    shared = everyone(tp, weights)
    assert all(other == shared[0] for other in shared)


class Language(nn.Module):
    def __init__(self, into: Any) -> None:
        super().__init__()
        self.table, self.block, self.head, self.into = nn.Linear(5, 8), Block(), nn.Linear(8, 11), into

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(self.into(self.table(x))))
        return result


@pytest.mark.parametrize(
    ("backend", "sequence"),
    [("eager", 1), ("eager", None), ("aot_eager", 1)],
)
def test_compiled_models(mesh, tp, backend, sequence):
    """Graphs break at communication; values, gradients and random streams stay the same in every batch."""
    torch.manual_seed(6)
    into = nn.Identity() if sequence is None else lambda x: scatter(x, tp, sequence)
    model = parallelize(Language(into).double(), tp, {**plan_of(sequence), "head": Vocabulary(sequence=sequence)})
    compiled = torch.compile(model, backend=backend)
    target = torch.arange(12).reshape(2, 6) % 11
    for step in range(4):
        model.train(step < 3)
        results: list[list[Any]] = []
        for called in (model, compiled):
            streams.seed(mesh, step)
            model.zero_grad()
            x = random(2, 6, 5, seed=step).requires_grad_()
            loss = vocabulary_cross_entropy(called(x), target, tp)
            loss.backward()
            results.append([loss.detach(), x.grad, *(p.grad for p in model.parameters())])
        for got, expected in zip(results[1], results[0], strict=True):
            assert_equal(got, expected)
    torch.compiler.reset()
