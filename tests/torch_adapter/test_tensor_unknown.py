"""Operations unknown to the rules were silently wrong, by 12 to 110 %, under "auto" and under own plans.

The oracle is one process: an earlier copy of the model.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
import commlib_torch
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_torch.tensor import ParallelMLP, parallelize, reduce, shard_of
from tests.inputs.plan_tables import reason
from tests.torch_adapter.pairs import Mlp, Two, is_right

PLAN: Plan = {"up": Column(), "down": Row()}


class Half(torch.autograd.Function):
    """A user-defined function that uses all features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.abs().sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Twice(torch.autograd.Function):
    """A user-defined function of single elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Back(torch.autograd.Function):
    """A user-defined function whose gradient alone uses all features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.abs().sum(-1, keepdim=True)


class Gated(torch.autograd.Function):
    """A function of two tensors. With `whole`, the gradient of the second one uses all features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.whole = whole
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gate = ctx.saved_tensors
        of_gate = gradient * x
        return gradient * gate, of_gate / of_gate.norm() if ctx.whole else of_gate, None


kept_twice, kept_back = Twice.apply, Back.apply
"""As models keep them when they are imported."""

WRONG_BACKWARD: dict[str, Any] = {
    "looked up": lambda h: Back.apply(h),
    "kept": lambda h: kept_back(h),
    "of two": lambda h: Gated.apply(h, h.tanh(), True),
    "after another one": lambda h: kept_back(kept_twice(h)),
    "in place": lambda h: Gated.apply(kept_back(h.clone()), h, False),
}

RIGHT_BACKWARD: dict[str, Any] = {
    "kept": lambda h: kept_twice(h),
    "of two": lambda h: Gated.apply(h, h.tanh(), False),
    "after another one": lambda h: Gated.apply(kept_twice(h), kept_twice(kept_twice(h) + 1), False),
    "along rows": lambda h: kept_back(h.transpose(1, 2)).transpose(1, 2),
}

WRONG: dict[str, Any] = {
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "vector_norm": lambda h: h / torch.linalg.vector_norm(h, dim=-1, keepdim=True),
    "group_norm": lambda h: F.group_norm(h.transpose(1, 2), 3).transpose(1, 2),
    "var_mean": lambda h: h - torch.var_mean(h, dim=-1, keepdim=True)[1],
    "softmax of flattened": lambda h: F.softmax(h.flatten(-2), -1).unflatten(-1, (5, -1)),
    "cosine_similarity": lambda h: h * F.cosine_similarity(h, h + 1, dim=-1).unsqueeze(-1),
    "baddbmm": lambda h: torch.baddbmm(h, h @ h.transpose(1, 2), h),
    "max_pool1d": lambda h: F.max_pool1d(h, 3, 1, 1),
    "permutation": lambda h: h[..., torch.arange(h.shape[-1] - 1, -1, -1)],
    "length": lambda h: h * h.shape[-1] ** -0.5,
    "item": lambda h: h / h.detach().abs().max().item(),
    "median": lambda h: h - h.median(dim=-1, keepdim=True)[0],
    "fft": lambda h: torch.fft.fft(h).real,
    "vmap": lambda h: torch.vmap(torch.vmap(lambda row: row / row.abs().sum()))(h),
    "a closure of vmap": lambda h: torch.vmap(lambda row: row / h.abs().sum())(h),
    "autograd function": lambda h: Half.apply(h),
    "float()": lambda h: h / float(h.abs().sum()),
    "tolist": lambda h: h / sum(map(abs, h.flatten().tolist())),
    "numpy": lambda h: h / float(abs(h.detach().numpy()).sum()),
    "a condition": lambda h: h / 3 if bool(h[..., :1].abs().sum() > 0.3 * h[..., -1:].abs().sum()) else h,
    "numel": lambda h: h * h.numel(),
    "linalg.pinv": lambda h: torch.linalg.pinv(h.transpose(1, 2)),
    "batch_norm": lambda h: h - h.mean((0, 1)).unsqueeze(0).roll(1, -1),
    "a length that is added": lambda h: h + len(h[0, 0]),
}

RIGHT: dict[str, Any] = {
    "elementwise": lambda h: torch.special.expit(h) + torch.logaddexp(h, h) + torch.sinc(h) + torch.hypot(h, h),
    "over rows": lambda h: h - h.median(dim=1, keepdim=True)[0],
    "pooling of rows": lambda h: F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "vmap": lambda h: torch.vmap(torch.vmap(torch.tanh))(h),
    "autograd function": lambda h: Twice.apply(h),
    "a condition": lambda h: h if bool(h.isfinite().all()) else h * 0,
    "lengths in reshapes": lambda h: h.reshape(-1, h.shape[-1]).view(*h.shape).tanh(),
}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.max_pool2d(self.up(x), 2))


class Picking(nn.Module):
    """Several layers in which the best of some experts processes a row."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(Mlp(F.gelu) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for _ in range(4):
            best = self.router(x).argmax(-1)
            x = x + torch.stack([expert(x) for expert in self.experts])[best, torch.arange(len(x))]
        return x


class Applied(nn.Module):
    """A layer that applies a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture
def tp(comm: Any) -> Any:
    return commlib.Mesh(tp=comm.size)["tp"]


def build_model(kind: Any, function: Any) -> Any:
    torch.manual_seed(3)
    return kind(function).double()


def rows() -> Tensor:
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.ranks(min=2, max=3)
class TestWrong:
    @pytest.mark.parametrize("name", WRONG)
    def test_auto_leaves_the_pair_whole(self, tp: Any, name: str) -> None:
        reports: list[str] = []
        model = build_model(Two, WRONG[name])
        plain = copy.deepcopy(model)
        parallelize(model, tp, "auto", example=rows(), report=reports.append)
        assert {name for name, module in model.named_modules() if hasattr(module, "style")} == {"last.up", "last.down"}
        if tp.rank == 0:
            assert "test_tensor_unknown.py:" in reason(reports[0], "first.up"), reports[0]
        is_right(plain, model, rows())

    @pytest.mark.parametrize("name", WRONG)
    def test_own_plans_are_refused(self, tp: Any, name: str) -> None:
        """With example= it is refused before anything is divided, otherwise at the first call."""
        model = build_model(Mlp, WRONG[name])
        with pytest.raises(UsageError, match=r"test_tensor_unknown\.py:\d+"):
            parallelize(model, tp, PLAN, example=rows())
        assert not any(hasattr(module, "style") for module in model.modules())
        divided = parallelize(model, tp, PLAN)
        with pytest.raises(UsageError, match=r"test_tensor_unknown\.py:\d+"):
            divided(rows())


@pytest.mark.ranks(max=3)
class TestRight:
    @pytest.mark.parametrize("way", ["example", "verify", "first call"])
    @pytest.mark.parametrize("name", [name for name in RIGHT if name != "a condition"])  # one bit proves nothing
    def test_valid_operations_pass_without_a_warning(self, tp: Any, name: str, way: str) -> None:
        model = build_model(Mlp, RIGHT[name])
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            options: dict[str, Any] = {} if way == "first call" else {way: rows()}
            parallelize(model, tp, PLAN, **options)
            is_right(plain, model, rows())

    @pytest.mark.parametrize("name", RIGHT)
    def test_auto_divides_valid_operations_correctly(self, tp: Any, name: str) -> None:
        model = build_model(Two, RIGHT[name])
        plain = copy.deepcopy(model)
        parallelize(model, tp, "auto", example=rows(), report=lambda table: None)
        is_right(plain, model, rows())

    @pytest.mark.parametrize("way", ["example", "first call", "auto"])
    def test_pooling_of_images(self, tp: Any, way: str) -> None:
        model = build_model(lambda _: Images(), None)
        plain, x = copy.deepcopy(model), rows()[None, :3].repeat(2, 1, 1, 1)
        options: dict[str, Any] = {} if way == "first call" else {"example": x, "report": lambda table: None}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(model, tp, "auto" if way == "auto" else PLAN, **options)
            is_right(plain, model, x)
        assert hasattr(model.up, "style")

    @pytest.mark.parametrize("way", ["example", "first call"])
    def test_choices_in_low_precision(self, tp: Any, way: str) -> None:
        """Rounding selects another expert for some words, and so changes all later numbers."""
        model = build_model(lambda _: Picking(), None).bfloat16()
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan: Plan = {"experts.*.up": Column(), "experts.*.down": Row()}
            parallelize(model, tp, plan, example=x if way == "example" else None)
            model(x)

    @pytest.mark.parametrize("verb", ["moves", "verbs"])
    def test_a_model_that_communicates_itself(self, tp: Any, verb: str) -> None:
        """It is correct only while divided, so the whole is no reference."""

        def total(x: Tensor) -> Any:
            return reduce(x, tp) if verb == "moves" else commlib_torch.all_reduce(x.detach(), ranks=tp)

        model = build_model(Mlp, lambda h: h / total(h.square().sum(-1, keepdim=True)).sqrt())
        plain = build_model(Mlp, lambda h: h / h.square().sum(-1, keepdim=True).sqrt())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(model, tp, PLAN)
            torch.testing.assert_close(model(rows()), plain(rows()), rtol=0, atol=1e-10)

    @pytest.mark.parametrize("way", ["example", "first call", "auto"])
    def test_values_may_be_overwritten(self, tp: Any, way: str) -> None:
        """A layer's input is later modified in place: each value is compared with its state at that time."""

        class InPlaceSum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)

            def forward(self, x: Tensor) -> Any:
                x = self.first(x)
                x += self.down(self.up(x).relu())
                return x.mul_(2)

        model = build_model(lambda _: InPlaceSum(), None)
        plain = copy.deepcopy(model)
        options: dict[str, Any] = {} if way == "first call" else {"example": rows(), "report": lambda table: None}
        parallelize(model, tp, "auto" if way == "auto" else PLAN, **options)
        with torch.no_grad():  # its own gradient needs the overwritten value
            torch.testing.assert_close(model(rows()), plain(rows()), rtol=0, atol=1e-10)
        assert hasattr(model.up, "style")

    def test_random_numbers_and_dropout(self, tp: Any) -> None:
        model = build_model(Mlp, lambda h: torch.special.bessel_j0(h))
        model.down = nn.Sequential(nn.Dropout(0.5), model.down)
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(model, tp, {"up": Column(), "down.0": Sequence(-1), "down.1": Row()})
            model(rows())
        is_right(plain.eval(), model.eval(), rows())


@pytest.mark.ranks(min=2, max=3)
class TestGradientsOfFunctions:
    """Regression: forwards matched, and gradients that use all features were silently wrong."""

    @pytest.mark.parametrize("name", WRONG_BACKWARD)
    def test_wrong_ones_are_refused(self, tp: Any, name: str) -> None:
        model = build_model(Mlp, WRONG_BACKWARD[name])
        with pytest.raises(UsageError, match=r"Back|Gated"):
            parallelize(model, tp, PLAN, example=rows())
        divided = parallelize(model, tp, PLAN)
        with torch.no_grad():
            divided(rows())  # without gradients
        with pytest.raises(UsageError, match=r"the gradient of (Back|Gated) in the model, .*test_tensor_unknown\.py"):
            divided(rows())

    def test_operators_of_libraries(self, tp: Any) -> None:
        """They are not autograd functions, but have their own backward."""
        twice = torch.library.custom_op("commlib_tests::twice", lambda x: x * 2, mutates_args=(),
                                        schema="(Tensor x) -> Tensor")  # fmt: skip
        for gradient in (lambda _, gradient: gradient * 2, lambda _, gradient: Back.backward(None, gradient)):
            torch.library.register_autograd(twice, gradient)
            plain = build_model(Mlp, lambda h: twice(h))
            divided = parallelize(copy.deepcopy(plain), tp, PLAN)
            if gradient(None, torch.ones(2))[0] == 2:
                is_right(plain, divided, rows())
                continue
            with pytest.raises(UsageError, match="the gradient of twice in the model"):
                divided(rows())

    @pytest.mark.parametrize("way", ["first call", "example", "auto"])
    @pytest.mark.parametrize("name", RIGHT_BACKWARD)
    def test_valid_functions_pass_silently(self, tp: Any, name: str, way: str) -> None:
        model = build_model(Two, RIGHT_BACKWARD[name])
        plain = copy.deepcopy(model)
        options: dict[str, Any] = {} if way == "first call" else {"example": rows(), "report": lambda table: None}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan: Plan = {"*.up": Column(), "*.down": Row()}
            parallelize(model, tp, "auto" if way == "auto" else plan, **options)
            is_right(plain, model, rows())
        assert hasattr(model.first.up, "style") or (way == "auto" and name in ("of two", "after another one"))


def test_auto_tries_functions_on_parts(tp: Any) -> None:
    """Regression: any autograd function left its pair whole; one whose backward uses all features still does."""
    torch.manual_seed(0)
    for function in (Twice, Back, Half):
        model = Two(lambda h, function=function: function.apply(h)).double()
        plain, x = copy.deepcopy(model), torch.randn(4, 5, 8, dtype=torch.float64)
        parallelize(model, tp, "auto", example=x, report=lambda text: None)
        if tp.size > 1:
            assert (model.first.up.weight.shape[0] < 12) == (function is Twice)
        plain(x).square().sum().backward()
        model(x).square().sum().backward()
        shard, expected = shard_of(model.first.up.weight), plain.first.up.weight.grad
        assert expected is not None
        expected = expected if shard is None else torch.from_numpy(shard.own(expected.numpy()))
        torch.testing.assert_close(model.first.up.weight.grad, expected, rtol=0, atol=1e-10)


def test_functions_of_all_hidden_features_are_no_activations(tp: Any) -> None:
    """Regression: such a function was taken for an activation."""
    for activation in (lambda h: h.softmax(-1), lambda h: h / h.norm(), lambda h: h * h.shape[-1]):
        with pytest.raises(UsageError, match="needs all hidden features"):
            ParallelMLP(8, 12, tp, activation=activation)
    for activation in (torch.special.expit, nn.GELU(), nn.Dropout(0.5), Twice.apply, lambda h: h.median(1)[0]):
        ParallelMLP(8, 12, tp, activation=activation)


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("name", ["fft", "length"])
def test_pipelines_compare_an_example(comm: Any, name: str) -> None:
    mesh = commlib.Mesh(pp=1, tp=comm.size)
    model = build_model(lambda _: nn.Sequential(nn.Linear(8, 12), Applied(WRONG[name]), nn.Linear(12, 8)), None)
    parallelize(model, mesh["tp"], {"0": Column(), "2": Row()})
    with pytest.raises(UsageError, match=r"differs from the unsharded model's"):
        commlib_torch.pipeline(model, mesh["pp"], loss=nn.MSELoss(), microbatches=2, example=rows())


@pytest.mark.ranks(min=2, max=3)
def test_different_batches_are_warned_of(tp: Any) -> None:
    """Regression: each rank combined its own batch with the other ranks' parts of theirs."""
    model = parallelize(build_model(Mlp, torch.relu), tp, PLAN)
    with pytest.warns(UserWarning, match="the same batch") if tp.rank == 0 else nullcontext():
        model(rows() + tp.rank)


@pytest.mark.ranks(min=2, max=3)
class TestUndecidable:
    """If numbers cannot decide, a warning names the unknown operation and its place."""

    @pytest.mark.parametrize("name", ["fft", "item", "autograd function", "vmap"])
    def test_an_input_that_is_a_part(self, tp: Any, name: str) -> None:
        """The model's input is already divided, so no whole can be run."""

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.down, self.up, self.last = nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)

            def forward(self, x: Tensor) -> Any:
                return self.last(WRONG[name](self.up(self.down(x))))

        model = build_model(lambda _: Inside(), None)
        parallelize(model, tp, {"down": Row(), "up": Column(), "last": Row()})
        part = rows().tensor_split(tp.size, -1)[tp.rank]
        text = r"test_tensor_unknown\.py:\d+: .*\(by (max in the model, of values sharded by )?up\).*sharded already"
        with pytest.warns(UserWarning, match=text) if tp.rank == 0 else nullcontext():
            model(part)
