"""Plans of layers beyond linear ones: embeddings, logits, whole attention, norms and dropout on shards.

These need the styles Vocabulary and Sequence, and Column on nn.MultiheadAttention, on plain modules of PyTorch.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.tensor_parallel import Column, PerRank, Plan, Replicate, Row, Sequence, Slice, Vocabulary
from commlib_torch.clip import clip_grad_norm_
from commlib_torch.tensor import (
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    parallelize,
    verify,
)

WORDS, WIDTH, HEADS, TOKENS = 37, 24, 6, 5


class LanguageModel(nn.Module):
    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 41)
        self.act, self.drop, self.down = nn.GELU(), nn.Dropout(dropout), nn.Linear(41, WIDTH)
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(TOKENS))
        x = x + self.down(self.drop(self.act(self.up(self.norm(x)))))
        result: Tensor = self.head(self.last(x))
        return result


class OneHeadOfKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (-1, 4)).transpose(1, 2)
        k, v = (layer(x).unsqueeze(1) for layer in (self.k, self.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        result: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result


ALONG: Plan = {
    "words": Vocabulary(sequence=1),
    "norm": Sequence(),
    "up": Column(sequence=1),
    "down": Row(sequence=1),
    "last": Sequence(),
    "head": Vocabulary(gather=True, sequence=1),
}


@pytest.fixture
def tp(comm):
    return commlib.Mesh(tp=comm.size)["tp"]


def build(kind, *args, **options):
    torch.manual_seed(3)
    return kind(*args, **options).double()


def words():
    return torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def rows():
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same_losses(plain, divided, x):
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, divided)]
    for _ in range(3):
        losses = []
        for model, optimizer in zip((plain, divided), optimizers, strict=True):
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, 1), x.flatten()) if out.shape[-1] == WORDS else out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("tied", [False, True])
def test_auto_divides_words_and_logits(tp, tied):
    model: Any = build(LanguageModel, tied=tied)
    plain = copy.deepcopy(model)
    parallelize(model, tp, "auto", verify=words(), report=lambda table: None)
    assert (model.words.style, model.head.style) == (Vocabulary(), Vocabulary(gather=True))
    assert (model.up.style, model.down.style) == (Column(), Row())
    assert not hasattr(model.places, "style")
    same_losses(plain, model, words())


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("norm_first", [False, True])
def test_auto_of_an_encoder_layer(tp, norm_first):
    model: Any = build(nn.TransformerEncoderLayer, WIDTH, HEADS, 41, 0.1, batch_first=True, norm_first=norm_first)
    plain = copy.deepcopy(model)
    parallelize(model, tp, "auto", verify=rows(), report=lambda table: None)
    assert model.self_attn.style == Column()
    assert (model.linear1.style, model.dropout.style, model.linear2.style) == (Column(), Sequence(2), Row())
    same_losses(plain.eval(), model.eval(), rows())


@pytest.mark.ranks(max=3)
def test_auto_shares_one_head_of_keys(tp):
    model: Any = build(OneHeadOfKeys)
    plain = copy.deepcopy(model)
    parallelize(model, tp, "auto", verify=rows(), report=lambda table: None)
    assert (model.q.style, model.o.style) == (Column(units=HEADS), Row(units=HEADS))
    assert model.k.style == model.v.style == Replicate(into_sharded=True)
    same_losses(plain, model, rows())


class Without(LanguageModel):
    """A model without positions, which would be those of a shard."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.down(self.drop(self.act(self.up(self.norm(x)))))
        result: Tensor = self.head(self.last(x))
        return result


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("way", ["verify", "example", "first call"])
def test_a_region_along_its_sequence(tp, way):
    model = build(Without)
    plain = copy.deepcopy(model)
    divided = parallelize(model, tp, ALONG, **({} if way == "first call" else {way: words()}))
    verify(divided, plain, tp, words())
    same_losses(plain, divided, words())


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": None}, r"norm \(LayerNorm\).*unsharded weights take gradients"),
        ({"head": None}, r"head \(Linear\).*unsharded weights take gradients"),
        ({"words": Vocabulary()}, r"norm .*must not be summed"),
        ({"down": Row()}, "sharded values combine only"),
        ({"up": Column()}, "a Column takes an unsharded input"),
        ({"drop": None}, r"drop \(Dropout\).*different random numbers"),
        ({"places": None}, "sharded values combine only"),
    ],
)
def test_wrong_regions_are_refused(tp, changes, text):
    kind = LanguageModel if "places" in changes else Without
    plan = {"drop": Sequence(-1), **ALONG, **changes}
    plan = {name: style for name, style in plan.items() if style is not None}
    for options in ({"example": words()}, {}):
        with pytest.raises(UsageError, match=text):
            parallelize(build(kind, dropout=0.1), tp, plan, **options)(words())


@pytest.mark.ranks(min=2, max=2)
def test_a_rank_with_one_token_does_not_wait(tp):
    """Regression: one token broadcasts: this rank saw no error, and waited for a rank that had raised."""
    divided = parallelize(build(Without), tp, {**ALONG, "down": Row()})
    with pytest.raises(UsageError, match="combine only"):
        divided(words()[:, :3])
    tp.barrier()


@pytest.mark.ranks(max=3)
def test_logits_stay_divided_for_a_loss_that_supports_it(tp):
    model = build(LanguageModel)
    out = parallelize(model, tp, {"words": Vocabulary(), "head": Vocabulary()}, verify=words())(words())
    assert out.shape[-1] <= WORDS
    with pytest.raises(UsageError, match="tied weights need one style"):
        parallelize(build(LanguageModel, tied=True), tp, {"words": Vocabulary()}, example=words())


@pytest.mark.any_ranks
class TestAllOrNothing:
    """Regression: a plan that failed at one of its layers left earlier layers divided."""

    def refused(self, comm, model, plan, text, **options):
        """The model stays unchanged, also if ranks have different values or only one rank detects an error."""
        kinds = [type(module) for module in model.modules()]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(UsageError, match=text):
            parallelize(model, comm, plan, **options)
        assert [type(module) for module in model.modules()] == kinds
        assert not any(hasattr(module, "style") for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_layers_that_cannot_be_divided(self, comm):
        first = nn.Linear(4, 6)
        wrong = {
            "split among": (nn.Linear(6, 4), Row(units=1)) if comm.size > 1 else None,
            "add up to 5": (nn.Linear(6, 4), Column(parts=(2, 3))),
            "groups=2": (nn.Conv1d(6, 4, 1, groups=2), Column()),
            "its 2 heads": (nn.MultiheadAttention(6, 2), Column(parts=3)),
            "would see only a shard": (nn.LayerNorm(6), Sequence(-1)),
            "mixes positions of a sequence": (nn.BatchNorm1d(6, affine=False, track_running_stats=False), Sequence()),
            "max_norm": (nn.Embedding(6, 4, max_norm=1.0), Column()),
            "sparse": (nn.Embedding(6, 4, sparse=comm.rank == comm.size - 1), Vocabulary()),
        }
        for text, case in wrong.items():
            if case is not None:
                self.refused(comm, nn.Sequential(first, case[0]), {"0": Column(), "1": case[1]}, text)
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
        self.refused(comm, tied, {"0": Column(), "1": Row()}, "tied weights need one style")
        again = parallelize(nn.Sequential(first, nn.Linear(6, 4)), comm, {"0": Column(), "1": Row()})
        with pytest.raises(UsageError, match="is sharded already"):
            parallelize(again, comm, {"1": Replicate(into_sharded=True)})

    def test_ranks_with_different_values(self, comm):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.refused(comm, model, {"0": Column()}, "takes all features", example=torch.rand(2, 4))

    def test_a_model_that_fails_on_one_rank(self, comm):
        class Fails(nn.Sequential):
            def forward(self, x):
                return super().forward(x if comm.rank < comm.size - 1 else x[0, 0])

        model = Fails(nn.Linear(4, 6), nn.Linear(6, 4))
        with pytest.raises((UsageError, RuntimeError)):
            parallelize(model, comm, {"0": Column(), "1": Row()}, example=torch.rand(2, 4))
        assert type(model[0]) is nn.Linear
        with pytest.raises((UsageError, RuntimeError)):
            parallelize(model, comm, "auto", example=torch.rand(2, 4))


class GroupedHeads(nn.Module):
    """8 heads of queries that share fewer heads of keys and values."""

    def __init__(self, keys: int, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        self.q, self.o = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 4 * keys), nn.Linear(WIDTH, 4 * keys, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.repeats:
            k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=not self.repeats)
        result: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result


@pytest.mark.ranks(min=2)
def test_gathered_shared_heads(tp):
    """Regression: each head appeared once per rank that has it."""
    if tp.size % 2:
        pytest.skip("two heads")
    plain: Any = build(nn.Linear, WIDTH, 8)
    model = parallelize(copy.deepcopy(plain), tp, {"": Column(units=tp.size // 2, gather=True)})
    torch.testing.assert_close(model(rows()), plain(rows()), rtol=0, atol=1e-12)
    same_losses(plain, model, rows())


@pytest.mark.ranks(min=2)
def test_the_first_call_of_shared_heads(tp):
    """To compare it, the whole is assembled from shared heads."""
    if 8 % tp.size:
        pytest.skip("8 heads")
    keys = tp.size // 2
    plain: Any = build(GroupedHeads, keys, False)
    model = copy.deepcopy(plain)
    plan: Plan = {"q": Column(units=8), "k": Column(units=keys), "v": Column(units=keys), "o": Row(units=8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_losses(plain, parallelize(model, tp, plan), rows())


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("auto", [False, True])
def test_ranks_share_heads_of_keys(tp, auto, repeats):
    """Regression: fewer heads than ranks were refused. Sharing ranks sum a head's gradient; its norm counts once."""
    if 8 % tp.size:
        pytest.skip("8 heads")
    keys = tp.size // 2
    model: Any = build(GroupedHeads, keys, repeats)
    plain = copy.deepcopy(model)
    own: Plan = {"q": Column(units=8), "k": Column(units=keys), "v": Column(units=keys), "o": Row(units=8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model, tp, "auto" if auto else own, verify=rows(), report=lambda table: None)
    if keys > 1 or not auto:
        assert model.k.weight.shape == (4, WIDTH)
    state = gather_state_dict(model)
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    model.load_state_dict(state)
    for one in (plain, model):
        one(rows()).square().mean().backward()
    norms = [float(clip_grad_norm_(one.parameters(), 1e-3)) for one in (model, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    same_losses(plain, model, rows())
    assert all(
        torch.allclose(value, gathered, rtol=0, atol=1e-12)
        for value, gathered in zip(plain.state_dict().values(), gather_state_dict(model).values(), strict=True)
    )


class FusedHeads(nn.Module):
    """One weight makes queries and fewer heads of keys and values, as in Falcon, GPTBigCode and Phi-3."""

    def __init__(self, heads: int, keys: int, way: str) -> None:
        super().__init__()
        self.heads, self.keys, self.way = heads, keys, way
        self.qkv, self.o = nn.Linear(WIDTH, 4 * (heads + 2 * keys)), nn.Linear(4 * heads, WIDTH)

    def parts(self, x: Tensor) -> list[Tensor]:
        fused = self.qkv(x)
        if self.way == "heads":
            fused = fused.view(*x.shape[:2], self.heads + 2 * self.keys, 4)
            keys = [slice(-2 * self.keys, -self.keys), slice(-self.keys, None)]
            if self.keys == 1:
                return [fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]]
            return [fused[:, :, : -2 * self.keys], *(fused[:, :, one] for one in keys)]
        if self.way == "split":
            result = fused.split((4 * self.heads, 4 * self.keys, 4 * self.keys), -1)
        else:
            first, last = 4 * self.heads, 4 * (self.heads + self.keys)
            result = (fused[..., :first], fused[..., first:last], fused.narrow(-1, last, 4 * self.keys))
        return [one.unflatten(2, (-1, 4)) for one in result]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        result: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("heads", "keys", "way"),
    [
        (8, 1, "split"),
        (7, 1, "heads"),
        (8, 2, "heads"),
        (8, 2, "pieces"),
        (8, 1, "heads"),
        (8, 2, "split"),
        (7, 1, "split"),
        (7, 1, "pieces"),
    ],
)
def test_ranks_share_fused_heads(tp, heads, keys, way):
    """Regression: a weight was all divided or all whole: one head of keys for all queries left it whole."""
    if keys > 1 and heads % tp.size:
        pytest.skip("8 heads")
    model: Any = build(FusedHeads, heads, keys, way)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model, tp, "auto", verify=rows(), report=lambda table: None)
    own = even(heads, tp.size).counts[tp.rank]
    assert model.qkv.weight.shape == (4 * (own + 2 * max(1, keys // tp.size)), WIDTH)
    state = gather_state_dict(model)
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    model.load_state_dict(state)
    for one in (plain, model):
        one(rows()).square().mean().backward()
    for kind in (2.0, 3.0, float("inf")):
        norms = [
            float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters()], kind)) for one in (model, plain)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    same_losses(plain, model, rows())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (plain, model)]
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            one(rows()).square().mean().backward()
            clip_grad_norm_(one.parameters(), 1e-3)
            optimizer.step()
    gathered = gather_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(gathered[name], value, rtol=0, atol=1e-10)
    kept = gather_optimizer_state(optimizers[1], model.named_parameters())
    load_optimizer_state(optimizers[1], model.named_parameters(), kept)
    torch.testing.assert_close(
        kept["state"]["qkv.weight"]["exp_avg"], optimizers[0].state[plain.qkv.weight]["exp_avg"], rtol=0, atol=1e-12
    )


class WrittenOut(nn.Linear):
    """A linear layer written out, as in some models."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Noted(WrittenOut):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.more = nn.Parameter(torch.zeros(3))


class FixedHeads(nn.Module):
    """Uses a fixed number of all heads, as Falcon does."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = HEADS, kind(WIDTH, 3 * WIDTH), kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        cut = self.qkv(x).view(rows, tokens, self.heads, 3, WIDTH // HEADS)
        q, k, v = cut.permute(3, 0, 2, 1, 4)
        result: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


@pytest.mark.ranks(max=3)
def test_numbers_of_heads_become_local(tp):
    """Regression: a model that uses a number of heads stayed whole."""
    plain: Any = build(FixedHeads, WrittenOut)
    own: Plan = {"qkv": Column(units=HEADS), "o": Row(units=HEADS), "heads": PerRank(HEADS)}
    for plan in ("auto", own):
        model = copy.deepcopy(plain)
        parallelize(model, tp, plan, verify=rows(), report=lambda table: None)
        assert model.heads == even(HEADS, tp.size).counts[tp.rank] and plain.heads == HEADS
        assert isinstance(model.qkv, WrittenOut)
        same_losses(copy.deepcopy(plain), model, rows())
    with pytest.raises(UsageError, match="heads is sharded already"):
        parallelize(model, tp, {"heads": PerRank()})
    with pytest.raises(UsageError, match=r"no number is called 'width'; there are heads"):
        parallelize(copy.deepcopy(plain), tp, {"width": PerRank()})


class Biased(nn.Module):
    """Attention with an external bias for each head; heads may be joined with the batch."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.heads, self.joined = HEADS, joined
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, biases: Tensor) -> Tensor:
        cut = self.qkv(x).view(*x.shape[:2], self.heads, 3, WIDTH // HEADS)
        q, k, v = cut.permute(3, 0, 2, 1, 4)
        if self.joined:
            q, k, v = (one.reshape(x.shape[0] * self.heads, x.shape[1], -1) for one in (q, k, v))
            seen = biases.baddbmm(q, k.transpose(1, 2)).softmax(-1) @ v
            seen = seen.view(x.shape[0], self.heads, x.shape[1], -1)
        else:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=biases)
        result: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return result


class Slopes(nn.Module):
    """Computes the biases. learned: they are weights."""

    def __init__(self, joined: bool, *, learned: bool = False) -> None:
        super().__init__()
        self.attention, self.heads = Biased(joined), HEADS
        self.slopes = nn.Parameter(torch.ones(HEADS)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        slopes = 0.5 ** torch.arange(1, self.heads + 1, dtype=x.dtype) if self.slopes is None else self.slopes
        biases = slopes[:, None, None] * torch.arange(x.shape[1], dtype=x.dtype)
        if self.attention.joined:
            biases = biases.repeat(x.shape[0], 1, 1)
        result: Tensor = self.attention(x, biases=biases)
        return result


class LearnedSlopes(Slopes):
    def __init__(self) -> None:
        super().__init__(False, learned=True)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("joined", [True, False])
def test_biases_of_heads_become_local(tp, joined):
    """Regression: constants for all heads, as in ALiBi, kept attention whole."""
    plain: Any = build(Slopes, joined)
    own: Plan = {"*.qkv": Column(units=HEADS), "*.o": Row(units=HEADS), "*.heads": PerRank(HEADS)}
    own = {**own, "*.biases": Slice(0, HEADS)}
    for plan in ("auto", own) if HEADS % tp.size == 0 else (own,):
        model = copy.deepcopy(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(model, tp, plan, example=rows() if plan == "auto" else None, report=lambda table: None)
            model = copy.deepcopy(model)
            same_losses(copy.deepcopy(plain), model, rows())
        if tp.size > 1:
            assert model.attention.o.weight.shape[1] < WIDTH
            with pytest.raises(UsageError, match=r"attention\.biases has the shape .*, expected"):
                model.attention(rows(), biases=torch.ones(HEADS + 1, 1, 1).double())
    with pytest.raises(UsageError, match=r"no argument is called 'attention\.bias'"):
        parallelize(copy.deepcopy(plain), tp, {"attention.bias": Slice(0, HEADS)})


class ManyBiased(nn.Module):
    """Attention with biases of several names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Biased(False)

    def forward(self, x: Tensor, *, far: Tensor, near: Tensor, left: Tensor, right: Tensor, both: Tensor) -> Tensor:
        result: Tensor = self.attention(x, biases=far + near + left + right + both)
        return result


class ManySlopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = ManyBiased()

    def forward(self, x: Tensor) -> Tensor:
        slopes = 0.5 ** torch.arange(HEADS, dtype=x.dtype)[:, None, None]
        named = {name: slopes * at for at, name in enumerate(("far", "near", "left", "right", "both"))}
        result: Tensor = self.block(x, **named)
        return result


@pytest.mark.ranks(max=3)
def test_several_arguments_are_recorded_in_one_order(tp):
    """Regression: the order of a set of names differs among processes, so that `verify` sometimes refused the plan."""
    plain: Any = build(ManySlopes)
    own: Plan = {"*.qkv": Column(units=HEADS), "*.o": Row(units=HEADS), "*.heads": PerRank(HEADS)}
    slices = {f"block.{name}": Slice(0, HEADS) for name in ("far", "near", "left", "right", "both")}
    model = parallelize(copy.deepcopy(plain), tp, {**own, **slices}, verify=rows())
    same_losses(plain, model, rows())


@pytest.mark.ranks(min=2, max=2)
def test_learned_biases_of_heads_are_not_sliced(tp):
    """Each rank would have only the gradient of its own heads."""
    plain: Any = build(LearnedSlopes)
    own: Plan = {"*.qkv": Column(units=HEADS), "*.o": Row(units=HEADS), "attention.heads": PerRank(HEADS)}
    with pytest.raises(UsageError, match="not a constant"):
        parallelize(copy.deepcopy(plain), tp, {**own, "*.biases": Slice(0, HEADS)}, example=rows())


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("kind", [Scaled, Noted])
def test_a_linear_layer_with_another_computation(tp, kind):
    with pytest.raises(UsageError, match=f"qkv is a {kind.__name__}, but Column is for"):
        parallelize(build(FixedHeads, kind), tp, {"qkv": Column(units=HEADS)})


class HeadNorm(nn.Module):
    """A norm of each head, written as operations."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.weight, self.mixes = nn.Parameter(torch.rand(4)), mixes

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True) if self.mixes else x
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class NormedHeads(nn.Module):
    """Attention with normalised heads, as in Qwen3."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.other = HeadNorm(mixes), HeadNorm()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, 4)) for layer in (self.q, self.k, self.v))
        q, k, v = self.norm(q).transpose(1, 2), self.other(k).transpose(1, 2), v.transpose(1, 2)
        result: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


@pytest.mark.ranks(max=3)
def test_a_norm_of_each_head_written_out(tp):
    """Regression: each rank had a part of its weight's gradient, so that attention stayed whole."""
    plain: Any = build(NormedHeads)
    model = copy.deepcopy(plain)
    parallelize(model, tp, "auto", verify=rows(), report=lambda table: None)
    assert model.q.style == Column(units=HEADS) and model.norm.style == Sequence(2)
    assert isinstance(model.norm, HeadNorm)
    same_losses(plain, copy.deepcopy(model), rows())


@pytest.mark.ranks(max=2)
def test_an_operation_that_mixes_positions_is_no_norm(tp):
    with pytest.raises(UsageError, match="norm is a HeadNorm, but Sequence is for"):
        parallelize(build(NormedHeads, True), tp, {"norm": Sequence(2)})
