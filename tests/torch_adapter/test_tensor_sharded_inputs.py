"""Models called with each rank's part of a sequence: operations along the sequence before any divided layer.

The oracle is one process: an earlier copy of the model, called with the whole.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_torch.tensor import parallelize
from commlib_torch.tensor.sequences import shard_sequence
from tests.torch_adapter.dividing import assert_equal, random, shard

pytestmark = pytest.mark.ranks(min=2)

PLAN: Plan = {"up": Column(sequence=1), "down": Row(sequence=1)}
Between = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, before: Between) -> None:
        super().__init__()
        self.before, self.norm = before, nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.positions, self.scale = nn.Parameter(torch.rand(64, 8)), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.before(self, x) if other is None else x * other.tanh()
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


def build(before: Between) -> Block:
    torch.manual_seed(0)
    return Block(before).double()


def shifted(m: Any, x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def swapped(m: Any, x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat((second, first), 1)


WRONG: dict[str, Between] = {
    "a mean": lambda m, x: x - x.mean(1, keepdim=True),
    "a maximum": lambda m, x: x - x.amax(1, keepdim=True),
    "softmax": lambda m, x: x.softmax(1),
    "a running sum": lambda m, x: x.cumsum(1),
    "a shift": shifted,
    "rolled": lambda m, x: x + x.roll(1, 1),
    "the first": lambda m, x: x + x[:, :1],
    "halves": swapped,
    "turned": lambda m, x: x + x.flip(1),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "pooled": lambda m, x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "a transform": lambda m, x: torch.fft.fft(x, dim=1).real,
    "positions": lambda m, x: x + torch.arange(x.shape[1]).sin()[:, None],
    "a weight cut to the length": lambda m, x: x + m.positions[: x.shape[1]],
    "the length": lambda m, x: x / x.shape[1],
    "a norm that is whole": lambda m, x: m.norm(x),
    "a weight": lambda m, x: x * m.scale,
    "one after another": lambda m, x: torch.stack([x[:, : at + 1].sum(1) for at in range(x.shape[1])], 1),
}
RIGHT: dict[str, Between] = {
    "nothing": lambda m, x: x,
    "one element at a time": lambda m, x: x.tanh() * 2 - 1,
    "features": lambda m, x: x * x.mean(-1, keepdim=True),
    "features, transposed": lambda m, x: x.transpose(0, 1).softmax(-1).transpose(0, 1),
    "heads": lambda m, x: x.unflatten(-1, (2, 4)).softmax(-1).flatten(2),
    "as rows": lambda m, x: x.reshape(-1, 8).tanh().view(x.shape),
    "split and joined": lambda m, x: torch.stack([one.tanh() for one in x.unbind(1)], 1),
    "an unknown function": lambda m, x: torch.special.i0(x),
}


@pytest.mark.parametrize("name", WRONG)
def test_operations_on_the_whole_sequence_are_refused(comm: Any, name: str) -> None:
    divided = parallelize(build(WRONG[name]), comm, PLAN)
    with pytest.raises(
        UsageError, match=r"plan: .*(by the caller|differs from the unsharded|gathers a sequence takes an input)"
    ):
        divided(shard(random(2, 4 * comm.size, 8), comm, 1))


@pytest.mark.parametrize("name", RIGHT)
def test_operations_on_single_positions_pass(comm: Any, name: str) -> None:
    plain = build(RIGHT[name])
    x = random(2, 4 * comm.size, 8)
    expected = plain(x)
    divided = parallelize(copy.deepcopy(plain), comm, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = divided(shard(x, comm, 1))
    assert_equal(got, shard(expected, comm, 1), name)
    assert not [one for one in caught if "plan:" in str(one.message)], name


def test_a_whole_example_is_checked_too(comm: Any) -> None:
    """It replaces the check of the first call."""
    for name in ("the length", "halves", "a mean"):
        with pytest.raises(UsageError, match=r"plan: "):
            parallelize(build(WRONG[name]), comm, PLAN, example=random(2, 4 * comm.size, 8))
    plain = build(RIGHT["features"])
    x = random(2, 4 * comm.size, 8)
    divided = parallelize(copy.deepcopy(plain), comm, PLAN, example=x)
    assert_equal(divided(shard(x, comm, 1)), shard(plain(x), comm, 1))


def test_two_parts_may_be_combined(comm: Any) -> None:
    """One of them enters no divided layer directly."""
    plain = build(RIGHT["nothing"])
    x, other = random(2, 4 * comm.size, 8), random(1, 4 * comm.size, 1, seed=2)
    divided = parallelize(copy.deepcopy(plain), comm, PLAN)
    got = divided(shard(x, comm, 1), shard(other, comm, 1))
    assert_equal(got, shard(plain(x, other), comm, 1))


def test_a_norm_in_the_plan(comm: Any) -> None:
    plain = build(lambda m, x: m.norm(x))
    x = random(2, 4 * comm.size, 8)
    divided = parallelize(copy.deepcopy(plain), comm, {**PLAN, "norm": Sequence(1)})
    assert_equal(divided(shard(x, comm, 1)), shard(plain(x), comm, 1))


def test_features_divided_by_the_caller(comm: Any) -> None:
    """A Row without a Column takes features divided by its caller; earlier operations must treat them one by one."""

    class Last(nn.Module):
        def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.before, self.down = before, nn.Linear(4 * comm.size, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.before(x))  # type: ignore[no-any-return]

    x = random(2, 3, 4 * comm.size)
    torch.manual_seed(0)
    plain = Last(torch.tanh).double()
    divided = parallelize(copy.deepcopy(plain), comm, {"down": Row()})
    assert_equal(divided(shard(x, comm, 2)), plain(x))
    wrong = parallelize(Last(lambda h: h.softmax(-1)).double(), comm, {"down": Row()})
    with pytest.raises(UsageError, match=r"softmax.*by the caller"):
        wrong(shard(x, comm, 2))


@pytest.mark.parametrize("divided_first", [True, False])
def test_balanced_parts_are_warned_of(comm: Any, divided_first: bool) -> None:
    """Regression: layers joined them in rank order, so that attention saw tokens in a different order."""
    axis = commlib.Mesh(tp=comm.size)["tp"]
    x = random(2, 4 * comm.size, 8)
    model = parallelize(build(RIGHT["nothing"]), axis, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if divided_first:
            model(shard(x, comm, 1))
        part = shard_sequence(x, axis)
        for _ in range(2):
            model(part)
    messages = [str(one.message) for one in caught if "in the layout 'balanced'" in str(one.message)]
    assert len(messages) == (comm.rank == 0), messages
