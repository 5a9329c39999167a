"""Models for which tracing, or reading a trace, raised an unrelated error, such as an index out of range.

The oracle is one process: an earlier copy of the model.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_torch.tensor import parallelize
from tests.torch_adapter.pairs import Mlp, Two, is_right

PLAN: Plan = {"up": Column(), "down": Row()}


@pytest.fixture
def tp(comm: Any) -> Any:
    return commlib.Mesh(tp=comm.size)["tp"]


class Attention(nn.Module):
    """Queries of several heads share one or more heads of keys, whose number is used in computations."""

    def __init__(self, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.width = heads, shared, 4
        self.q, self.o = nn.Linear(8, heads * self.width), nn.Linear(heads * self.width, 8)
        self.k, self.v = (nn.Linear(8, shared * self.width) for _ in "kv")

    def forward(self, x: Tensor) -> Any:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.width).transpose(1, 2)
        k, v = (one(x).view(batch, tokens, self.shared, self.width).transpose(1, 2) for one in (self.k, self.v))
        k, v = (one.repeat_interleave(self.heads // self.shared, 1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, self.heads * self.width))


def build(kind: Any, *args: Any) -> Any:
    torch.manual_seed(3)
    return kind(*args).double()


def rows() -> Tensor:
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def given(how: str) -> dict[str, Any]:
    """Return arguments of parallelize that check a plan."""
    return {} if how == "first call" else {how: rows()}


@pytest.mark.ranks(min=2, max=3)
class TestOperations:
    def test_operations_before_a_difference(self, tp: Any) -> None:
        """Regression: Llama finds the beginnings of sequences, and diff took more arguments than its equation."""

        def begins(h: Tensor) -> Tensor:
            places = torch.arange(5).expand(4, -1)
            first = torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1
            return h.masked_fill(first.unsqueeze(-1), 0.0)

        model = build(Two, begins)
        plain = copy.deepcopy(model)
        parallelize(model, tp, "auto", example=rows(), report=str)
        assert isinstance(model.first.up.style, Column)
        is_right(plain, model, rows())

    @pytest.mark.parametrize("how", ["verify", "example"])
    def test_the_dtype_of_a_part(self, tp: Any, how: str) -> None:
        """A value cast to the dtype of a part is not a part."""
        model = build(Mlp, lambda h: F.prelu(h, torch.tensor([0.1]).to(h)))
        plain = copy.deepcopy(model)
        parallelize(model, tp, PLAN, **given(how))
        is_right(plain, model, rows())

    def test_features_one_by_one(self, tp: Any) -> None:
        model = build(Two, lambda h: torch.stack(h.unbind(-1)[::-1], -1))
        plain = copy.deepcopy(model)
        parallelize(model, tp, "auto", example=rows(), report=str)
        assert not hasattr(model.first.up, "style") and isinstance(model.last.up.style, Column)
        is_right(plain, model, rows())

    def test_heads_that_are_divided_by_heads(self, tp: Any) -> None:
        """A rank would have no head of the shared keys, by which the number of queries is divided."""
        torch.manual_seed(3)
        model: Any = nn.Sequential(Attention(2 * tp.size, 1), Mlp(torch.relu)).double()
        plain = copy.deepcopy(model)
        parallelize(model, tp, "auto", example=rows(), report=str)
        assert isinstance(model[1].up.style, Column)
        is_right(plain, model, rows())


def halves(h: Tensor) -> Tensor:
    count = h.shape[-1] // 2
    return h[..., :count] * h[..., count:].sigmoid()


def heads(h: Tensor) -> Tensor:
    """Attention with six heads, computed from slices of one weight."""
    count = h.shape[-1] // 3
    q, k, v = (h[..., at * count : (at + 1) * count].unflatten(-1, (-1, 2)).transpose(1, 2) for at in range(3))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


FUSED: dict[str, tuple[Any, int]] = {
    "F.glu": (lambda h: F.glu(h, -1), 24),
    "GLU": (nn.GLU(), 24),
    "along another dimension": (lambda h: F.glu(h.transpose(1, 2), 1).transpose(1, 2), 24),
    "slices": (halves, 24),
    "slices from behind": (lambda h: h[..., : -(h.size(-1) // 2)] + h[..., -(h.size(-1) // 2) :].tanh(), 24),
    "heads": (heads, 36),
}


@pytest.mark.ranks(max=3)
class TestFused:
    """Regression: gated units and slices of fused weights were refused, although chunks were accepted."""

    @pytest.mark.parametrize("how", ["first call", "verify", "auto"])
    @pytest.mark.parametrize("name", FUSED)
    def test_are_divided_part_by_part(self, tp: Any, name: str, how: str) -> None:
        function, width = FUSED[name]
        model = build(Mlp, function, width)
        plain, units = copy.deepcopy(model), 6 if name == "heads" else 0
        plan: Any = {"up": Column(width // 12, units), "down": Row(units=units)}
        if how == "auto":
            parallelize(model, tp, "auto", example=rows(), report=str)
        else:
            parallelize(model, tp, plan, **given(how))
        assert model.up.style.parts == width // 12
        is_right(plain, model, rows())

    @pytest.mark.ranks(min=2, max=3)
    def test_need_parts(self, tp: Any) -> None:
        for function, width in FUSED.values():
            with pytest.raises(UsageError, match=r"give it Column\(parts="):
                parallelize(build(Mlp, function, width), tp, PLAN, example=rows())
        whole = build(Mlp, lambda h: h[..., :12] + h[..., 12:], 24)  # only the whole model has them
        with pytest.raises(UsageError):
            parallelize(whole, tp, {"up": Column(2), "down": Row()})(rows())


CHOICES: dict[str, Any] = {
    "the largest": lambda h: h.clamp(-1, 1) * 0.5 if h.abs().max() > 1e6 else h,
    "all are finite": lambda h: h if bool(h.isfinite().all()) else h * 0,
    "a sum": lambda h: h * 2 if h.sum() > -1e6 else h * 3,
    "an integer": lambda h: h * (2 + int((h > 1e6).sum())),
    "a norm": lambda h: h if torch.linalg.vector_norm(h.std(-1)) < 1e6 else h * 3,
    "how many differ": lambda h: h * (2 if len(h.detach().round().unique()) > 1 else 3),
    "how many are large": lambda h: h * 2 if len((h > -1e6).nonzero()) else h,
}
"""They choose by a part what to do, and all ranks do the same with most batches."""


@pytest.mark.ranks(min=2, max=3)
class TestChoices:
    """Regression: a condition on a part was accepted, because the first batch gave the same result on all ranks."""

    @pytest.mark.parametrize("name", CHOICES)
    @pytest.mark.parametrize("how", ["first call", "example", "verify"])
    def test_warn(self, tp: Any, how: str, name: str) -> None:
        model = build(Mlp, CHOICES[name])
        plain = copy.deepcopy(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, tp, PLAN, **given(how))
            is_right(plain, model, rows())
        messages = re.findall(
            r"test_tensor_traced_models\.py:\d+: Python numbers", "".join(f"{one.message}" for one in caught)
        )
        assert bool(messages) == (tp.rank == 0), caught

    @pytest.mark.parametrize("how", ["first call", "example", "verify"])
    def test_conditions_on_whole_tensors_do_not_warn(self, tp: Any, how: str) -> None:
        model = nn.Sequential(build(Mlp, torch.relu), Chooses()).double()
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(model, tp, {f"0.{name}": style for name, style in PLAN.items()},
                        **given(how))  # fmt: skip
            is_right(plain, model, rows())


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2 if x.abs().max() > 1 else x * 3
