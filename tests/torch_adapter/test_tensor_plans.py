"""Plans of PyTorch models: invalid ones are refused, valid ones accepted, and verify names the layer that differs."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_torch.tensor import ColumnLinear, gather, parallelize, scatter, verify

WORDS, WIDTH, HEADS, TOKENS = 37, 24, 6, 5


class Slopes(nn.Module):
    """Computes slopes by a function."""

    def forward(self, x):
        return F.rrelu(x, training=self.training)


class Attention(nn.Module):
    """Heads, split in the ways that models use."""

    def __init__(self, kv: int, way: str) -> None:
        super().__init__()
        self.size, self.way = WIDTH // HEADS, way
        if way == "plain":
            self.a, self.b, self.c = (nn.Linear(WIDTH, heads * self.size) for heads in (HEADS, kv, kv))
        else:
            self.abc = nn.Linear(WIDTH, 3 * WIDTH)
        self.d, self.group = nn.Linear(WIDTH, WIDTH), HEADS // kv

    def forward(self, x):
        rows, tokens, _ = x.shape
        if self.way == "parts":
            cut = self.abc(x).reshape(rows, tokens, 3, -1, self.size)
            q, k, v = cut.permute(2, 0, 3, 1, 4)
        else:
            each = self.abc(x).chunk(3, -1) if self.way == "chunk" else (self.a(x), self.b(x), self.c(x))
            q, k, v = (part.view(rows, tokens, -1, self.size).transpose(1, 2) for part in each)
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if self.way == "chunk":
            y = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            scores = q @ k.transpose(-1, -2) * self.size**-0.5
            y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return self.d(y.transpose(1, 2).reshape(rows, tokens, -1))


class OwnNorm(nn.Module):
    """A norm written as operations, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, kv=HEADS, way="plain", gated=False, norm=nn.LayerNorm) -> None:
        super().__init__()
        self.e, self.f = (norm() if norm is OwnNorm else norm(WIDTH) for _ in range(2))
        self.g, self.h, self.i = Attention(kv, way), nn.Linear(WIDTH, 41), nn.Linear(41, WIDTH)
        self.j = nn.Linear(WIDTH, 41, bias=False) if gated else None

    def forward(self, x):
        x = x + self.g(self.e(x))
        y = self.f(x)
        y = F.gelu(self.h(y)) if self.j is None else F.silu(self.j(y)) * self.h(y)
        return x + self.i(y)


class LanguageModel(nn.Module):
    """GPT with way="chunk"; LLaMA with grouped queries, gates and its own norms."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.k, self.l = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.m = nn.ModuleList(Block(**options) for _ in range(2))
        self.n, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.k(ids) + self.l(torch.arange(ids.shape[1]))
        for block in self.m:
            x = block(x)
        return self.o(self.n(x))


GPT = {"way": "chunk"}
LLAMA = {"kv": 3, "gated": True, "norm": OwnNorm}
FUSED = {"way": "parts"}
PAIR: Plan = {"h": Column(), "i": Row()}
PLAN: Plan = {**{f"g.{name}": Column(units=HEADS) for name in "abc"}, "g.d": Row(units=HEADS), **PAIR}


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


def same_training(plain, divided, x):
    """Train both for some steps and check that losses are equal."""
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (plain, divided)]
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


def refused(tp, model, plan, text, x=None):
    """Check that the plan is refused before anything is divided, and without an example at the first call."""
    x = rows() if x is None else x
    whole = copy.deepcopy(model)
    with pytest.raises(UsageError, match=text):
        parallelize(whole, tp, plan, example=x)
    assert not any(hasattr(module, "style") for module in whole.modules())
    divided = parallelize(model, tp, plan)
    with pytest.raises(UsageError, match=text):
        divided(x)


@pytest.mark.ranks(max=3)
class TestPlans:
    @pytest.mark.parametrize("options", [GPT, LLAMA, FUSED])
    def test_auto(self, tp, options):
        """Plans depend on the order of layers, not on their names."""
        reports: list[str] = []
        model = build(LanguageModel, **options)
        plain = copy.deepcopy(model)
        divided = parallelize(model, tp, "auto", verify=words(), report=reports.append)
        assert len(reports) == (tp.rank == 0)
        styles = {name: module.style for name, module in divided.named_modules() if hasattr(module, "style")}
        for block in ("m.0", "m.1"):
            firsts = ("a", "b", "c") if options is LLAMA else ("abc",)
            heads = 3 if options is LLAMA else HEADS
            parts = 1 if options is LLAMA else 3
            assert {styles[f"{block}.g.{name}"] for name in firsts} == {Column(parts, heads)}
            assert styles[f"{block}.g.d"] == Row(units=heads)
            assert styles[f"{block}.h"] == Column()
            assert styles[f"{block}.i"] == Row()
            assert (f"{block}.j" in styles) == (options is LLAMA)
        same_training(plain, divided, words())

    def test_auto_of_an_encoder_layer(self, tp):
        model = build(nn.TransformerEncoderLayer, WIDTH, HEADS, 41, 0.0, batch_first=True)
        plain = copy.deepcopy(model)
        divided: Any = parallelize(model, tp, "auto", example=rows(), report=lambda table: None)
        assert (divided.linear1.style, divided.linear2.style) == (Column(), Row())
        same_training(plain, divided, rows())

    def test_auto_gives_reasons(self, tp):
        reports: list[str] = []
        with pytest.raises(UsageError, match="finds no layer"):
            parallelize(nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 4)), tp, "auto",
                        example=torch.rand(2, 4), report=reports.append)  # fmt: skip
        assert tp.rank or "needs a full dimension" in " ".join(reports[0].split())
        with pytest.raises(UsageError, match="pass a batch as example= or verify="):
            parallelize(nn.Linear(4, 6), tp, "auto")
        with pytest.raises(UsageError, match='expected styles by names of layers, or "auto"'):
            parallelize(nn.Linear(4, 6), tp, "Auto")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="report must be a function of a text, such as print, got 3"):
            parallelize(nn.Linear(4, 6), tp, "auto", example=torch.rand(2, 4), report=cast("Any", 3))

    def test_auto_leaves_out_indivisible_layers(self, tp):
        """The rules treat grouped convolutions like others, but the layer cannot be divided."""
        reports: list[str] = []
        grouped = nn.Sequential(nn.Conv1d(4, 12, 1), nn.ReLU(), nn.Conv1d(12, 4, 1, groups=4))
        model = nn.Sequential(grouped, nn.Sequential(nn.Conv1d(4, 12, 1), nn.ReLU(), nn.Conv1d(12, 4, 1)))
        divided = parallelize(model, tp, "auto", example=torch.rand(2, 4, 5), report=reports.append)
        styles = {name: module.style for name, module in divided.named_modules() if hasattr(module, "style")}
        assert styles == {"1.0": Column(), "1.2": Row()}
        assert tp.rank or "0.2 cannot be sharded as Row()" in " ".join(reports[0].split())

    @pytest.mark.parametrize("way", ["verify", "example", "first call"])
    def test_valid_plans(self, tp, way):
        model = build(Block)
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            divided = parallelize(model, tp, PLAN, **({} if way == "first call" else {way: rows()}))
            same_training(plain, divided, rows())

    @pytest.mark.parametrize(
        ("left_out", "text"),
        [
            ("g.d", r"g\.d \(Linear\).*takes all features"),
            ("g.a", r"sharded values combine only with values sharded the same way"),
            ("g.b", r"sharded values combine only with values sharded the same way"),
            ("i", r"i \(Linear\).*takes all features"),
            ("h", r"i \((Row)?Linear\).*a Row takes an input that a Column has sharded.*split=True"),
        ],
    )
    def test_what_is_left_out(self, tp, left_out, text):
        refused(tp, build(Block), {name: style for name, style in PLAN.items() if name != left_out}, text)

    def test_invalid_plans(self, tp):
        fused: Plan = {"g.d": Row(units=HEADS), **PAIR}
        refused(tp, build(Block, **GPT), {**fused, "g.abc": Column(units=HEADS)}, r"chunk in g.*Column\(parts=3\)")
        refused(tp, build(Block, **FUSED), {**fused, "g.abc": Column()}, r"needs a full dimension|fused features")
        refused(tp, build(Block), {**PLAN, "i": Row(sequence=1)}, r"add.*sharded|returns unsharded values")
        norm = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8))
        refused(tp, norm, {"0": Column(), "2": Row()}, "needs a full dimension", torch.rand(3, 8))
        dropout = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.1), nn.Linear(12, 8))
        refused(tp, dropout, {"0": Column(), "2": Row()}, "different random numbers on each rank", torch.rand(3, 8))
        for draws in (nn.RReLU(), nn.FeatureAlphaDropout(0.1), Slopes()):
            model = nn.Sequential(nn.Linear(8, 12), draws, nn.Linear(12, 8))
            refused(tp, model, {"0": Column(), "2": Row()}, "different random numbers on each rank", torch.rand(3, 8))
        slope = nn.Sequential(nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8))
        refused(tp, slope, {"0": Column(), "2": Row()}, "take gradients from unsharded values", torch.rand(3, 8))

    def test_an_output_may_stay_divided_if_declared(self, tp):
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
        refused(tp, copy.deepcopy(model), {"0": Column()}, "a model returns unsharded values", torch.rand(3, 8))
        out = parallelize(model, tp, {"0": Column()}, verify=torch.rand(3, 8), divided_output=True)(torch.rand(3, 8))
        assert out.shape[1] <= 12
        alone = parallelize(nn.Linear(8, 12), tp, {"": Column()})
        assert isinstance(alone, ColumnLinear)
        assert alone(torch.rand(3, 8)).shape == out.shape

    def test_tied_layers_need_one_style(self, tp):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
        model[2].weight = model[0].weight
        with pytest.raises(UsageError, match="tied weights need one style"):
            parallelize(model, tp, {"0": Column(), "2": Row()}, example=torch.rand(3, 8))

    def test_a_models_own_moves_are_not_judged(self, tp):
        """This also holds on one rank, where they move nothing."""
        model = parallelize(build(Moves, tp), tp, {"down": Row()})
        assert model(rows()).shape == rows().shape

    @pytest.mark.ranks(min=2)
    def test_a_fixed_number_of_heads_is_detected(self, tp):
        """einops and views with a fixed number of heads mix heads, or fail, on a rank that has only some."""

        class Mixing(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                heads = self.a(x).reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)
                y = (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
                return self.b(y.transpose(1, 2).flatten(2))

        plan: Plan = {"a": Column(), "b": Row()}
        with pytest.raises(UsageError, match=r"reshape in the model.* unsharded, but \[2, 5, 6, .*use -1"):
            parallelize(build(Mixing), tp, plan, example=rows())
        alone = parallelize(build(Mixing), tp, plan)
        if tp.size == 3:  # 8 features are no 6 heads
            with pytest.raises(UsageError, match=r"reshape in the model.*cannot become \[2, 5, 6, -1\]"):
                alone(rows())
        else:
            with pytest.raises(UsageError, match=r"reshape in the model.* unsharded, but \[2, 5, 6, .*use -1"):
                alone(rows())  # which warned, with the reason, and continued


class Moves(nn.Module):
    """A model that scatters and gathers rows by its own moves."""

    def __init__(self, axis) -> None:
        super().__init__()
        self.axis_of_rows, self.up, self.down = axis, nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x):
        x = self.down(scatter(self.up(x * 2), self.axis_of_rows, -1))
        return gather(scatter(x, self.axis_of_rows, 1), self.axis_of_rows, 1)


class Fails(nn.Sequential):
    """A model with a shape in numbers."""

    def forward(self, x):
        return self[1](self[0](x).view(3, 2, 6).flatten(1))


@pytest.mark.ranks(max=3)
class TestVerify:
    @pytest.mark.ranks(min=2)
    @pytest.mark.parametrize("name", ["g.b", "g.d", "i", "e"])
    def test_a_layer_that_differs_is_named(self, tp, name):
        plain = build(Block)
        divided = parallelize(copy.deepcopy(plain), tp, PLAN, example=rows())
        verify(divided, plain, tp, rows())
        if tp.rank == 1:
            with torch.no_grad():
                divided.get_submodule(name).weight.view(-1)[0] += 1e-3
        with pytest.raises(UsageError) as caught:
            verify(divided, plain, tp, rows())
        text = str(caught.value)
        assert f"verify: {name} (" in text, text
        ranks = "rank 1 of" if name in ("g.b", "e") else "ranks 0, 1" if tp.size == 2 else "ranks 0, 1, 2"
        assert ranks in text, text
        verify(divided, plain, tp, rows(), tolerance=1.0)

    @pytest.mark.ranks(min=2)
    def test_a_wrong_gradient_is_named(self, tp):
        """The forward is correct, but a layer loses a part of the gradient."""

        class Loses(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                return gradient / 2

        class Lossy(nn.Sequential):
            loses = False

            def forward(self, x):
                y = self[0](x)
                return self[1](Loses.apply(y) if self.loses else y)

        plain: Any = build(Lossy, nn.Linear(7, 9), nn.Linear(9, 5))
        divided: Any = parallelize(copy.deepcopy(plain), tp, {"0": Column(), "1": Row()}, verify=rows()[0, :, :7])
        divided.loses = True
        with pytest.raises(UsageError, match=r"the gradient of input 0 differs.* 0\.5 of its largest"):
            verify(divided, plain, tp, rows()[0, :, :7])

    def test_it_leaves_no_trace(self, tp):
        torch.manual_seed(5)
        layers = nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        model: Any = nn.Sequential(*layers).train()
        statistics, state = model[3].running_mean.clone(), torch.get_rng_state()
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(2), requires_grad=True)
        parallelize(model, tp, {"0": Column(), "2": Row()}, verify=x)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert x.grad is None
        assert all(module.training for module in model.modules())
        assert torch.equal(model[3].running_mean, statistics)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("batch", ["tensor", "tuple", "dict"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_batches_and_dtypes(self, tp, batch, dtype):
        x = rows()[0, :, :7].to(dtype)
        given = {"tensor": x, "tuple": (x,), "dict": {"input": x}}[batch]
        model = build(nn.Sequential, nn.Linear(7, 9), nn.Linear(9, 5)).to(dtype)
        parallelize(model, tp, {"0": Column(), "1": Row()}, verify=given)

    def test_a_batch_of_another_kind_is_refused(self, tp):
        with pytest.raises(UsageError, match="expected a tensor, or a tuple or dict"):
            parallelize(nn.Linear(7, 9), tp, {"": Column()}, verify="x")

    @pytest.mark.ranks(min=2)
    def test_a_model_that_fails_when_divided_is_reported(self, tp):
        model = Fails(nn.Linear(8, 12), nn.Linear(12, 8))
        with pytest.raises(UsageError, match=r"view in the model.*cannot become \[3, 2, 6\] on this rank.*use -1"):
            parallelize(copy.deepcopy(model), tp, {"0": Column(), "1": Row()}, example=torch.rand(3, 8))
        with pytest.raises(UsageError, match=r"view in the model"):
            parallelize(model, tp, {"0": Column(), "1": Row()})(torch.rand(3, 8))


@pytest.mark.ranks(max=2)
def test_first_calls_are_checked_once(tp):
    """The check runs the model three more times: divided, whole, and divided next to the whole.

    Output of the process reveals the runs, but no list that the model appends to.
    """
    calls, printed = [], io.StringIO()

    class Counted(nn.Sequential):
        def forward(self, x):
            calls.append(1)
            printed.write("x")
            return super().forward(x)

    model = parallelize(build(Counted, nn.Linear(7, 9), nn.Linear(9, 5)), tp, {"0": Column(), "1": Row()})
    other = copy.deepcopy(model)
    for each in (model, other):
        calls.clear()
        before = len(printed.getvalue())
        for _ in range(3):
            each(rows()[0, :, :7])
        assert len(calls) == 3
        assert len(printed.getvalue()) - before == (6 if tp.size > 1 else 4)
