"""Divided attention of PyTorch compared with plain attention: masks, inputs, whole transformers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_torch.tensor import ColumnAttention, ParallelAttention, parallelize
from tests.torch_adapter.dividing import Pair, assert_equal, assert_same_gradients, check, own_head, pair, random

HEADS, WIDTH, BATCH, QUERIES, KEYS = 5, 15, 2, 4, 7


@pytest.fixture(scope="module")
def tp(comm):
    return commlib.Mesh(tp=comm.size)["tp"]


def compare(models: Pair, inputs: list[Tensor], which: tuple[int, int, int], **options: Any) -> None:
    """Compare attention: outputs, weights and all gradients. which: the inputs used as query, key and value."""
    kept, outputs = [], []
    for model in models:
        model.zero_grad()
        own = [x.detach().clone().requires_grad_() for x in inputs]
        given = {
            name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in options.items()
        }
        out, weights = model(*(own[index] for index in which), **given)
        loss = (out * random(*out.shape, seed=8)).sum()
        if weights is not None:
            loss = loss + (weights * random(*weights.shape, seed=9)).sum()
        loss.backward()
        outputs.append((out, weights))
        kept.append([x.grad for x in (*own, *(x for x in given.values() if isinstance(x, Tensor)))])
    for what, got, expected in zip(("output", "weights"), outputs[1], outputs[0], strict=True):
        assert_equal(got, expected, what)
    for index, (got, expected) in enumerate(zip(kept[1], kept[0], strict=True)):
        assert_equal(got, expected, f"input {index}")
    assert_same_gradients(models)


KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no bias": {"bias": False},
    "bias of k and v": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "add_bias_kv": True},
    "widths": {"kdim": 6, "vdim": 8},
    "batch first": {"batch_first": True},
}


@pytest.mark.parametrize("need_weights", [None, "mean", "each"])
@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention(tp, kind, need_weights):
    options = KINDS[kind]
    models = pair(tp, lambda: nn.MultiheadAttention(WIDTH, HEADS, **options), {"": Column()})
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    shapes = [(QUERIES, WIDTH), (KEYS, widths[1]), (KEYS, widths[2])]
    dim = 0 if options.get("batch_first") else 1
    batched = [random(*s, seed=i).unsqueeze(dim).repeat_interleave(BATCH, dim) for i, s in enumerate(shapes)]
    batched[0] = batched[0] * random(*batched[0].shape, seed=7)
    how = {"need_weights": need_weights is not None, "average_attn_weights": need_weights == "mean"}
    same = widths[1] == widths[2] == WIDTH
    for which in ((0, 1, 2), (0, 1, 1)) if same else ((0, 1, 2),):
        compare(models, batched, which, **how)
    compare(models, [random(*s, seed=i) for i, s in enumerate(shapes)], (0, 1, 2), **how)
    hidden = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    hidden[1, 4:] = True
    per_head = random(BATCH * HEADS, QUERIES, KEYS, seed=4)
    compare(models, batched, (0, 1, 2), key_padding_mask=hidden, **how)
    compare(models, batched, (0, 1, 2), attn_mask=per_head, **how)
    compare(models, batched, (0, 1, 2), attn_mask=per_head > 0.9, key_padding_mask=hidden, **how)
    compare(models, batched, (0, 1, 2), attn_mask=per_head[0], key_padding_mask=hidden.double(), **how)
    apart = [random(*s, seed=i) for i, s in enumerate(shapes)]
    compare(models, apart, (0, 1, 2), attn_mask=per_head[:HEADS], key_padding_mask=hidden[1], **how)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_self_attention(tp, need_weights, overlaps):
    for options in ({}, {"batch_first": True}):
        models = pair(tp, partial(nn.MultiheadAttention, WIDTH, HEADS, **options), {"": Column()})
        models.divided.axis.overlaps = overlaps
        for inputs in ([random(3, 6, WIDTH)], [random(6, WIDTH)]):
            length = inputs[0].shape[-2 if options or inputs[0].dim() == 2 else 0]
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            compare(models, inputs, (0, 0, 0), need_weights=need_weights)
            compare(models, inputs, (0, 0, 0), need_weights=need_weights, attn_mask=mask, is_causal=True)
    models = pair(tp, lambda: nn.MultiheadAttention(WIDTH, HEADS), {"": Column()})
    models.divided.axis.overlaps = overlaps
    for which in ((0, 0, 1), (0, 1, 0)):  # Q and K of one tensor; Q and V
        compare(models, [random(3, 6, WIDTH), random(3, 6, WIDTH, seed=5)], which, need_weights=need_weights)


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_over_shards_of_a_sequence(tp, batch_first):
    dim = 1 if batch_first else 0
    models = pair(tp, lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first), {"": Column(sequence=dim)})
    whole = [random(7, 7, WIDTH, seed=seed).requires_grad_() for seed in range(2)]
    own = [own_head(tp, dim)(x.detach()).clone().requires_grad_() for x in whole]
    expected, _ = models.plain(whole[0], whole[1], whole[1])
    got, _ = models.divided(own[0], own[1], own[1], need_weights=False)
    assert_equal(got, own_head(tp, dim)(expected))
    factors = random(*expected.shape, seed=3)
    (expected * factors).sum().backward()
    (got * own_head(tp, dim)(factors)).sum().backward()
    for one, other in zip(own, whole, strict=True):
        assert other.grad is not None
        assert_equal(one.grad, own_head(tp, dim)(other.grad))
    assert_same_gradients(models)


FEEDFORWARD: Plan = {"*linear1": Column(), "*.dropout": Sequence(-1), "*linear2": Row()}
ATTENTION: Plan = {"*self_attn": Column()}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("plan", [{**ATTENTION, **FEEDFORWARD}, FEEDFORWARD, ATTENTION])
def test_encoders(tp, plan, norm_first):
    """In evaluation PyTorch's fused kernel would read divided weights, and remove padding from tensors."""

    def make():
        layer = nn.TransformerEncoderLayer(16, 4, 10, 0.0, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 2)

    models = pair(tp, make, plan)
    x, hidden = random(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    hidden[1, 3:] = True
    check(tp, models, x)
    check(tp, models, x, src_key_padding_mask=hidden)
    for model in models:
        model.eval()
    check(tp, models, x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for options in ({}, {"src_key_padding_mask": hidden}):
                expected, got = models.plain(x, **options), models.divided(x, **options)
                assert_equal(got[~hidden], expected[~hidden], tolerance=1e-11)  # computed by the fused kernel


def test_decoders(tp):
    plan: Plan = {"*_attn": Column(), "*linear1": Column(), "*linear2": Row()}
    models = pair(tp, lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 10, 0.0), 2), plan)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    check(tp, models, random(5, 3, 16), random(4, 3, 16, seed=2), tgt_mask=mask, tgt_is_causal=True)
    for model in models:
        model.eval()
    check(tp, models, random(5, 3, 16), random(4, 3, 16, seed=2), tgt_mask=mask)


@pytest.mark.parametrize("sequence", [None, 0, 1])
@pytest.mark.parametrize("kv_heads", [None, 4])
def test_parallel_attention(comm, tp, kv_heads, sequence):
    alone = comm.split(comm.rank)
    for options in ({"causal": True}, {"bias": False}):
        models = []
        for axis, along in ((alone, None), (tp, sequence)):
            torch.manual_seed(4)
            model: Any = ParallelAttention(24, 8, axis, kv_heads=kv_heads, sequence=along, **options)
            models.append(model.double())
        part = (lambda whole: whole) if sequence is None else own_head(tp, sequence)
        check(tp, Pair(*models), random(5, 6, 24), shards=sequence, part=part)
        each = random(5, 8, 6, 6, seed=6)
        for mask in () if options.get("causal") else (each, each[:1, :1] > -0.5, each[0, 0]):
            check(tp, Pair(*models), random(5, 6, 24), shards=sequence, part=part, mask=mask)


def test_the_gradient_of_a_learned_mask(comm, tp):
    alone, gradients = comm.split(comm.rank), []
    for axis in (alone, tp):
        torch.manual_seed(4)
        layer = ParallelAttention(24, 8, axis).double()
        mask = random(8, 6, 6).requires_grad_()
        (layer(random(2, 6, 24), mask) * random(2, 6, 24, seed=3)).sum().backward()
        gradients.append(mask.grad)
    assert_equal(gradients[1], gradients[0])


def test_parallel_attention_matches_pytorch(comm):
    alone = comm.split(comm.rank)
    torch.manual_seed(1)
    layer = ParallelAttention(6, 2, alone, bias=False, causal=True)
    x = random(1, 5, 6).float()
    q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in (x @ layer.qkv.weight.t()).chunk(3, -1))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), expected @ layer.out.weight.t())


def test_attention_constructed_divided(tp):
    torch.manual_seed(3)
    plain = nn.MultiheadAttention(16, 4)
    torch.manual_seed(3)
    divided = ColumnAttention(16, 4, tp)
    x = random(5, 2, 16).float()
    torch.testing.assert_close(divided(x, x, x), plain(x, x, x))
    again = copy.deepcopy(divided)
    torch.testing.assert_close(again(x, x, x), plain(x, x, x))


def test_autocast(tp):
    model = nn.TransformerEncoderLayer(16, 4, 10, 0.0, batch_first=True)
    for parameter in model.parameters():
        parameter.data = random(*parameter.shape).float() * 0.1
    divided = parallelize(copy.deepcopy(model), tp, {"self_attn": Column(), "linear1": Column(), "linear2": Row()})
    x = random(2, 5, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(x), divided(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
    got.float().sum().backward()


def test_mismatched_arguments_are_refused(tp):
    attention: Any = parallelize(nn.MultiheadAttention(WIDTH, HEADS), tp, {"": Column()})
    x = random(4, 2, WIDTH).float()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"is_causal": True}, "is_causal"),
        ({"attn_mask": torch.ones(3, 4)}, r"attn_mask has shape \[3, 4\], expected \[4, 4\]"),
        ({"attn_mask": torch.ones(2, 4, 4)}, r"expected \[10, 4, 4\]"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.int64)}, "torch.int64"),
        ({"key_padding_mask": torch.ones(3, 4)}, r"expected \[2, 4\]"),
    ]
    for options, text in cases:
        with pytest.raises(UsageError, match=text):
            attention(x, x, x, **options)
    with pytest.raises(UsageError, match="its 5 heads"):
        parallelize(nn.MultiheadAttention(WIDTH, HEADS), tp, {"": Column(gather=True)})
    cases = [({"kv_heads": 3}, "multiple"), ({"dropout": 1.0}, "dropout")]
    for options, text in cases:
        with pytest.raises(UsageError, match=text):
            ParallelAttention(16, 4, tp, **options)
    layer = ParallelAttention(16, 4, tp)
    with pytest.raises(UsageError, match="expected 4 heads or 1"):
        layer(random(1, 3, 16).float(), torch.ones(2, 3, 3))


@pytest.mark.ranks(min=2)
def test_fewer_heads_than_ranks_are_refused(tp):
    with pytest.raises(UsageError, match="1 units"):
        parallelize(nn.MultiheadAttention(4, 1), tp, {"": Column()})
    with pytest.raises(UsageError, match="1 units"):
        ParallelAttention(16, 4, tp, kv_heads=1)
