"""Divided linear layers: outputs, gradients and training match the whole layer."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Mesh
from commlib.errors import MismatchError, UsageError
from commlib.tensor_parallel import Column, Replicate, Row
from commlib_torch._shards import shard_of, shards_in
from commlib_torch.tensor import ColumnLinear, RowLinear, gather, gather_state_dict, parallelize, scatter

WIDTH, HIDDEN = 7, 11  # odd: nothing divides them


class MLP(nn.Module):
    def __init__(self, hidden: int = HIDDEN, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias)
        self.down = nn.Linear(hidden, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def make(seed: int = 0, **options: Any) -> MLP:
    torch.manual_seed(seed)
    return MLP(**options).double()


def data(rows: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def compare(divided: nn.Module, plain: nn.Module, x: Tensor, *, second: bool = False) -> None:
    """Compare outputs, gradients of inputs and weights, and those of a penalty on the inputs' gradients."""
    results = []
    for model in (divided, plain):
        given = x.clone().requires_grad_()
        out = model(given)
        loss = out.pow(2).sum()
        (first,) = torch.autograd.grad(loss, given, create_graph=second, retain_graph=True)
        (loss + first.pow(2).sum() if second else loss).backward()
        results.append((out, first, given.grad))
    close(results[0], results[1])
    for (name, got), expected in zip(divided.named_parameters(), plain.parameters(), strict=True):
        shard = shard_of(got)
        whole = expected.grad
        assert whole is not None, name
        close(got.grad, whole if shard is None else torch.from_numpy(shard.own(whole.numpy())))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_column_and_row(comm: Any, bias: bool, second: bool, overlaps: bool) -> None:
    plain = make(bias=bias)
    divided: Any = parallelize(copy.deepcopy(plain), Mesh(tp=comm.size)["tp"], {"up": Column(), "down": Row()})
    assert nn.Linear in type(divided.up).__mro__  # still
    divided.up.axis.overlaps = overlaps
    compare(divided, plain, data(), second=second)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [5, 8, 1])
def test_a_divided_sequence(comm: Any, dim: int, rows: int, overlaps: bool) -> None:
    """Between divided layers each rank has a part of the sequence, possibly of odd length, and the bias counts once."""
    plain = make()
    plan: Any = {"up": Column(sequence=dim), "down": Row(sequence=dim)}
    divided: Any = parallelize(copy.deepcopy(plain), comm, plan)
    divided.up.axis.overlaps = overlaps

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = divided

        def forward(self, x: Tensor) -> Tensor:
            return gather(self.inner(scatter(x, comm, dim)), comm, dim)

    compare(Outside(), plain, data(rows))


class Attention(nn.Module):
    """Q, K and V are three layers with one input, or one layer with three parts; the number of heads is odd."""

    def __init__(self, *, fused: bool, heads: int = 4, size: int = 3) -> None:
        super().__init__()
        self.fused, self.size = fused, size
        width = heads * size
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, width) for _ in range(3))
        self.out = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        three = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        heads = [part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in three]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        out: Tensor = self.out(mixed)
        return out


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_heads_stay_whole(comm: Any, fused: bool, overlaps: bool) -> None:
    torch.manual_seed(0)
    plain = Attention(fused=fused).double()
    columns = Column(parts=3 if fused else 1, units=4)
    plan: Any = {"qkv": columns} if fused else {"[qkv]": columns}
    divided: Any = parallelize(copy.deepcopy(plain), comm, {**plan, "out": Row(units=4)})
    divided.out.axis.overlaps = overlaps
    compare(divided, plain, data())


@pytest.mark.ranks(min=2)
def test_layers_with_one_input_share_one_reduction(comm: Any) -> None:
    """Regression: the gradients of Q's, K's and V's input were reduced separately, with three times the bytes."""
    torch.manual_seed(0)
    divided: Any = parallelize(Attention(fused=False).double(), comm, {"[qkv]": Column(units=4), "out": Row(units=4)})
    calls = []
    with pytest.MonkeyPatch.context() as patch:

        def counted(reduce: Any) -> Any:
            def counting(self: Any, x: Any, *arguments: Any, **options: Any) -> Any:
                calls.append(x.nbytes)
                return reduce(self, x, *arguments, **options)

            return counting

        for name in ("all_reduce", "all_reduce_async"):
            patch.setattr(type(comm), name, counted(getattr(type(comm), name)))
        x = data().requires_grad_()
        divided(x)  # the first call checks the plan
        calls.clear()
        divided(x).sum().backward()
    assert calls == [x.nbytes] * 2  # the output, forward; the input, backward
    axis = divided.out.axis
    assert axis.entered is None  # the input is freed, and so is its cached copy


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("gradients", [False, True])
def test_layers_with_one_input_share_one_gather(comm: Any, gradients: bool) -> None:
    torch.manual_seed(0)
    columns = Column(units=4, sequence=1)
    divided: Any = parallelize(
        Attention(fused=False).double(), comm, {"[qkv]": columns, "out": Row(units=4, sequence=1)}
    )
    calls = []
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):

        def counted(gather: Any) -> Any:
            def counting(self: Any, x: Any, *arguments: Any, **options: Any) -> Any:
                calls.append(x.size)
                return gather(self, x, *arguments, **options)

            return counting

        x = data(seed=comm.rank)  # this rank's part of a sequence
        divided(x)  # the first call checks the plan
        for name in ("all_gather", "all_gather_v"):
            patch.setattr(type(comm), name, counted(getattr(type(comm), name)))
        divided(x)
        divided(x)
    assert [size for size in calls if size == x.numel()] == [x.numel()] * 2


@pytest.mark.parametrize("gather", [False, True])
def test_an_input_modified_by_numpy_is_gathered_again(comm: Any, gather: bool) -> None:
    """Regression: PyTorch does not count numpy's writes, so that later steps reused the first batch."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, HIDDEN) if gather else nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    model = nn.Sequential(plain).double()
    divided = copy.deepcopy(model)
    plan: Any = {"0": Column(sequence=1, gather=True)}
    if not gather:
        plan = {"0.0": Column(sequence=1), "0.1": Row(sequence=1)}
    parallelize(divided, comm, plan)
    draws, part = np.random.default_rng(0), np.zeros((2, 3, WIDTH))
    x, first = torch.from_numpy(part), 3 * comm.rank
    for _ in range(3):
        whole = draws.normal(size=(2, 3 * comm.size, WIDTH))
        part[:] = whole[:, first : first + 3]
        expected = model(torch.from_numpy(whole))
        close(divided(x), expected if gather else expected[:, first : first + 3])


def test_an_input_without_gradients_is_freed(comm: Any) -> None:
    """Regression: each axis kept the last input of an evaluation for ever."""
    divided = parallelize(make(), comm, {"up": Column(), "down": Row()})
    x = data()
    with torch.no_grad():
        divided(x)
        divided(x)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_gather_and_split(comm: Any) -> None:
    for parts in (1, (5, 6)):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)).double()
        plan: Any = {"0": Column(gather=True, parts=parts), "1": Replicate(), "2": Row(split=True)}
        compare(parallelize(copy.deepcopy(plain), comm, plan), plain, data())


def test_values_do_not_depend_on_the_number_of_ranks(comm: Any) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).double()
    after = torch.rand(1)
    torch.manual_seed(3)
    up = ColumnLinear(WIDTH, HIDDEN, comm).double()
    down = RowLinear(HIDDEN, WIDTH, comm).double()
    assert torch.equal(torch.rand(1), after)
    compare(nn.Sequential(up, down), plain, data())


@pytest.mark.parametrize("overlaps", [False, True])
def test_training_in_float32_and_autocast(comm: Any, overlaps: bool) -> None:
    plain = make().float()
    divided: Any = parallelize(copy.deepcopy(plain), comm, {"up": Column(), "down": Row()})
    divided.up.axis.overlaps = overlaps
    for autocast in (False, True):
        for model in (plain, divided):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(data().float())
            out.float().pow(2).sum().backward()
        tolerance = 0.05 if autocast else 1e-5  # bfloat16 has 8 bits; sums are taken in another order
        for _, parameter, shard in shards_in(divided):
            grad = parameter.grad
            assert grad is not None
            whole = torch.from_numpy(shard.whole(grad.numpy()))
            expected = dict(plain.named_parameters())[_].grad
            assert expected is not None
            assert (whole - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("first", [False, True])
def test_an_earlier_optimizer_trains_the_divided_model(comm: Any, first: bool) -> None:
    """The parameters are the same objects, so an optimizer created before works."""
    plain, model = make(), make()
    optimizer = torch.optim.Adam(model.parameters(), 0.01) if first else None
    parallelize(model, comm, {"up": Column(), "down": Row()})
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.01)
    other = torch.optim.Adam(plain.parameters(), 0.01)
    for step in range(3):
        for network, stepping in ((model, optimizer), (plain, other)):
            stepping.zero_grad()
            network(data(seed=step)).pow(2).mean().backward()
            stepping.step()
    close(model(data()), plain(data()))


def test_values_come_from_rank_0(comm: Any) -> None:
    plain, model = make(0), make(comm.rank)
    compare(parallelize(model, comm, {"up": Column(), "down": Row()}), plain, data())


def test_codec(comm: Any) -> None:
    plain = make().float()
    divided: Any = parallelize(copy.deepcopy(plain), comm, {"up": Column(), "down": Row()}, codec="bf16")
    got, expected = divided(data().float()), plain(data().float())
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()
    assert comm.size == 1 or not torch.equal(got, expected)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        ({"up": Column(), "dwn": Row()}, UsageError, "no layer is called 'dwn'; there are down"),
        ({"up": Column(parts=2)}, UsageError, "up: parts=2, but 11 outputs cannot be split into as many equal parts"),
        ({"up": Column(units=3)}, UsageError, "a part of length 11 cannot be split into 3 equal units"),
        ({"": Column()}, UsageError, "is a MLP, but Column is for"),
    ],
)
def test_wrong_plans(comm: Any, plan: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        parallelize(make(), comm, plan)
    assert text in str(caught.value)


@pytest.mark.ranks(min=2)
def test_different_plans_on_ranks_are_refused(comm: Any) -> None:
    plan: Any = {"up": Column(), "down": Row()} if comm.rank else {"up": Column(), "down": Row(units=1)}
    with pytest.raises(MismatchError, match=r"down: Row\(split=False, units="):
        parallelize(make(), comm, plan)
    with pytest.raises(MismatchError, match="codec"):
        parallelize(make(), comm, {"up": Column()}, codec="bf16" if comm.rank else None)
    with pytest.raises(MismatchError, match=r"up\.weight"):
        parallelize(make(hidden=11 + comm.rank), comm, {"up": Column()})


@pytest.mark.ranks(min=2)
def test_an_undivided_input_is_refused(comm: Any) -> None:
    model = parallelize(make(), comm, {"down": Row()})
    with pytest.raises(
        UsageError, match=r"takes an input that a Column has sharded, but its input is unsharded: give it split=True"
    ):
        model(data())


def test_a_divided_model_can_be_copied_but_not_pickled(comm: Any) -> None:
    import pickle

    model = parallelize(make(), comm, {"up": Column(), "down": Row()})
    twin = copy.deepcopy(model)
    close(twin(data()), model(data()))
    with pytest.raises(UsageError, match="cannot be pickled: save the result of gather_state_dict"):
        pickle.dumps(model)


class LoRA(nn.Module):
    """LoRA around a layer, as users write it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


LORA: dict[str, dict[str, Any]] = {
    "divided": {"0.base": Column(), "0.b": Column(), "2.base": Row(), "2.a": Row()},
    "gathered": {"0.base": Column(gather=True), "2.base": Row(split=True)},
    "forgotten": {"0.base": Column(), "2.base": Row()},
}


@pytest.mark.parametrize("way", LORA)
def test_lora_around_divided_layers(comm: Any, way: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(LoRA(nn.Linear(WIDTH, HIDDEN)), nn.GELU(), LoRA(nn.Linear(HIDDEN, WIDTH))).double()
    divided = parallelize(copy.deepcopy(plain), comm, LORA[way])
    if way == "forgotten":
        with pytest.raises(UsageError, match=r"add in 0.* has that dimension in full .*by 0.base"):
            divided(data())
        return
    for model in (plain, divided):
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01)
        for step in range(3):
            model(data(seed=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    close(gather_state_dict(divided), dict(plain.state_dict()))


def test_auto_divides_lora_as_its_layers(comm: Any) -> None:
    """Regression: factors were divided by LoRA's rank next to whole layers, and merging added partial products."""
    torch.manual_seed(0)
    plain = nn.Sequential(LoRA(nn.Linear(WIDTH, HIDDEN)), nn.GELU(), LoRA(nn.Linear(HIDDEN, WIDTH))).double()
    divided: Any = parallelize(copy.deepcopy(plain), comm, "auto", example=data(), report=lambda table: None)
    assert {name for name, one in divided.named_modules() if hasattr(one, "style")} == set(LORA["divided"])
    model: Any
    for model in (plain, divided):
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
        model(data()).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for one in (model[0], model[2]):
                one.base.weight += one.b.weight @ one.a.weight
                one.b.weight.zero_()
    close(gather_state_dict(divided), dict(plain.state_dict()))
    close(divided(data(seed=1)), plain(data(seed=1)))
