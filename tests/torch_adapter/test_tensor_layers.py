"""Divided layers of PyTorch compared with plain ones: linear, convolutions, norms, whole blocks, and refusals."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Replicate, Row, Sequence
from commlib_torch.tensor import ColumnConv2d, ParallelMLP, RowConv1d, parallelize
from tests.torch_adapter.dividing import Pair, assert_equal, check, own_head, pair, random


@pytest.fixture(scope="module")
def tp(comm):
    return commlib.Mesh(tp=comm.size)["tp"]


CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(tp, dims, mode):
    conv = CONVS[dims]

    def make():
        first = conv(3, 7, 3, padding=1, stride=2, padding_mode=mode)
        return nn.Sequential(OrderedDict(up=first, act=nn.GELU(), down=conv(7, 5, 2, dilation=2 if dims == 1 else 1)))

    models = pair(tp, make, {"up": Column(), "down": Row()})
    check(tp, models, random(2, 3, *(9,) * dims))
    check(tp, models, random(3, *(9,) * dims))  # without a batch


def test_separate_convolutions(tp):
    image = random(2, 8, 6, 5)
    check(tp, pair(tp, lambda: nn.Conv2d(8, 9, 3), {"": Column(gather=True)}), image)
    check(tp, pair(tp, lambda: nn.Conv2d(8, 8, 3, bias=False), {"": Column()}), image, part=own_head(tp, 1))
    check(tp, pair(tp, lambda: nn.Conv2d(8, 12, 3), {"": Column(parts=(8, 4), units=4, gather=True)}), image)
    check(tp, pair(tp, lambda: nn.Conv2d(8, 3, 1), {"": Row(split=True)}), image)
    check(tp, pair(tp, lambda: nn.Conv2d(8, 3, 1), {"": Row(split=True, sequence=0)}), image, part=own_head(tp, 0))
    check(tp, pair(tp, lambda: nn.Conv2d(8, 4, 3), {"": Column(gather=True, sequence=0)}), random(5, 8, 4, 4), shards=0)


def test_a_convolution_constructed_divided(tp):
    torch.manual_seed(3)
    plain = nn.Conv2d(3, 8, 3, dtype=torch.float64)
    torch.manual_seed(3)
    divided = ColumnConv2d(3, 8, 3, ranks=tp, style=Column(gather=True), dtype=torch.float64)
    assert_equal(divided(random(2, 3, 5, 5)), plain(random(2, 3, 5, 5)))
    with pytest.raises(UsageError, match="groups=2"):
        RowConv1d(8, 4, 3, ranks=tp, groups=2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sequence", [None, 1])
def test_mlp(comm, tp, gated, sequence):
    alone = comm.split(comm.rank)
    torch.manual_seed(5)
    plain = ParallelMLP(6, 10, alone, gated=gated, activation="silu", dtype=torch.float64)
    torch.manual_seed(5)
    divided = ParallelMLP(6, 10, tp, gated=gated, activation="silu", sequence=sequence, dtype=torch.float64)
    part = own_head(tp, sequence) if sequence is not None else lambda whole: whole
    check(tp, Pair(plain, divided), random(2, 7, 6), shards=sequence, part=part)
    with pytest.raises(UsageError, match="softmax"):
        ParallelMLP(6, 10, tp, activation="softmax")


class Block(nn.Module):
    """A transformer block without attention, whose residual stream may be divided along a sequence."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.up, self.act, self.down = norm(6), nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)
        self.last = norm(6)

    def forward(self, x):
        return self.last(x + self.down(self.act(self.up(self.norm(x)))))


IN_SEQUENCE: Plan = {"norm": Sequence(), "up": Column(sequence=1), "down": Row(sequence=1), "last": Sequence()}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, partial(nn.LayerNorm, bias=False)])
def test_norms_on_shards_of_a_sequence(tp, norm, dim):
    plan: Plan = {
        "norm": Sequence(dim), "up": Column(sequence=dim), "act": Sequence(-1), "down": Row(sequence=dim),
        "last": Sequence(dim - 3),
    }  # fmt: skip
    models = pair(tp, lambda: Block(norm), plan)
    for length in (7, 3):
        check(tp, models, random(length, length, 6), shards=dim, part=own_head(tp, dim))
    again = Pair(models.plain, copy.deepcopy(models.divided))
    check(tp, again, random(7, 7, 6), shards=dim, part=own_head(tp, dim))


def test_a_norm_reduces_its_weights_once(tp, monkeypatch):
    """Weight and bias share one message; without weights there is none."""
    plain = commlib.Communicator.all_reduce
    calls: list[Any] = []

    def counting(self, x, *args, **kwargs):
        calls.append(x.shape)
        return plain(self, x, *args, **kwargs)

    for options, expected in (({}, 1), ({"elementwise_affine": False}, 0)):
        models = pair(tp, partial(nn.LayerNorm, 5, **options), {"": Sequence(0)})
        with monkeypatch.context() as patch:
            patch.setattr(commlib.Communicator, "all_reduce", counting)
            check(tp, models, random(9, 5), shards=0, part=own_head(tp, 0))
        assert len(calls) == expected * (tp.size > 1)
        calls.clear()


def test_second_gradients_through_a_norm(tp):
    models = pair(tp, Block, IN_SEQUENCE)
    gradients: list[Any] = []
    for model, x in ((models.plain, random(2, 5, 6)), (models.divided, own_head(tp, 1)(random(2, 5, 6)))):
        x = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        gradients.append(x.grad)
    assert_equal(gradients[1], own_head(tp, 1)(gradients[0]))


class Shared(nn.Module):
    """Attention with one head of keys for all queries."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(6, 8), nn.Linear(6, 1), nn.Linear(8, 6)

    def forward(self, x):
        return self.out(self.q(x) * self.k(x))


def test_a_whole_layer_into_divided_ones(tp):
    plan: Plan = {"q": Column(), "k": Replicate(into_sharded=True), "out": Row()}
    models = pair(tp, Shared, plan)
    whole, own = (random(4, 6).requires_grad_() for _ in range(2))
    expected, got = models.plain(whole), models.divided(own)
    assert_equal(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert_equal(models.divided.k.weight.grad, models.plain.k.weight.grad)
    # k has the same input on every rank, and a whole gradient, which must not be summed again.
    assert_equal(own.grad, whole.grad)


def test_mismatched_layers_are_refused(tp):
    cases: list[tuple[nn.Module, Plan, str]] = [
        (nn.LayerNorm(4), {"": Sequence(-1)}, r"reduces over dimensions \[-1\]"),
        (nn.LayerNorm((3, 4)), {"": Sequence(-2)}, r"reduces over dimensions \[-2, -1\]"),
        (nn.BatchNorm1d(4, affine=False, track_running_stats=False), {"": Sequence(0)}, "mixes positions"),
        (nn.Linear(4, 4), {"": Sequence(0)}, "Sequence is for .*GroupNorm.*LayerNorm.*RMSNorm"),
        (nn.Conv1d(4, 4, 1, groups=2), {"": Column()}, "groups=2"),
        (nn.Bilinear(2, 2, 2), {"": Column()}, "Bilinear"),
    ]
    for model, plan, text in cases:
        with pytest.raises(UsageError, match=text):
            parallelize(model, tp, plan)
    norm = parallelize(nn.LayerNorm(4), tp, {"": Sequence(1)})
    with pytest.raises(UsageError, match="takes no value sharded"):
        norm(torch.ones(2, 4))
    patched: Any = nn.Linear(4, 4)
    patched.forward = lambda x: x
    with pytest.raises(UsageError, match="a forward set on the object"):
        parallelize(patched, tp, {"": Column()})


@pytest.mark.ranks(min=2)
def test_undivided_channels_are_refused(tp):
    conv = parallelize(nn.Conv2d(8, 3, 1), tp, {"": Row()})
    with pytest.raises(UsageError, match="8 channels, expected"):
        conv(torch.ones(1, 8, 2, 2))


def test_an_input_that_requires_a_gradient_later(tp):
    """Regression: the move into a divided layer was cached while its input required no gradient."""
    layer = parallelize(nn.Linear(4, 6), tp, {"": Column(gather=True)})
    x = torch.ones(2, 4)
    layer(x)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None


def test_inference_mode(tp):
    """Tensors of inference mode have no version counter."""
    models = pair(tp, Block, IN_SEQUENCE)
    with torch.inference_mode():
        x = random(2, 5, 6)
        assert_equal(models.divided(own_head(tp, 1)(x)), own_head(tp, 1)(models.plain(x)))


def test_autocast(tp):
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.LayerNorm(6))
    divided = parallelize(copy.deepcopy(model), tp, {"0": Column(), "2": Row()})
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(x), divided(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
    got.float().sum().backward()
    assert all(parameter.grad is not None for parameter in divided.parameters())
