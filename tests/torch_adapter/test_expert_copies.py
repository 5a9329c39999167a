"""Copies of an MLP as experts: each has its own weights and the initial function of the MLP, or is refused by name."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import Communicator
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib_torch.expert import MoE, auxiliary_loss, expertize
from tests.torch_adapter.expert_oracle import near

WIDTH = 8


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)).double()


def around(inner: nn.Module) -> Any:
    return nn.Sequential(inner)


def plan(comm: Communicator, **options: Any) -> dict[str, Experts]:
    return {"0": Experts(2 * comm.size, **options)}


def over_all(inner: Any) -> None:
    original = inner.forward
    inner.forward = lambda x: original(x) * 2


def over_a_layer(inner: Any) -> None:
    original = inner[0].forward
    inner[0].forward = lambda x: original(x) * 2


def over_by_default(inner: Any) -> None:
    def forward(x: Tensor, layers: Any = (inner[0], inner[1], inner[2])) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    inner.forward = forward


def an_attribute(inner: Any) -> None:
    weight = inner[2].weight
    inner[1].scale = lambda x: x * weight.mean()


def a_hook(inner: Any) -> None:
    inner[0].register_forward_hook(lambda module, args, out: out + inner[2].bias.sum())


def by_a_method(inner: Any) -> None:
    inner.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, x) * 2, inner)


def by_a_partial(inner: Any) -> None:
    inner.forward = functools.partial(inner.forward)


def by_a_number(inner: Any) -> None:
    factor = 2.0
    inner[0].register_forward_hook(lambda module, args, out: out * factor)


@pytest.mark.parametrize("change", [over_all, over_a_layer, over_by_default, an_attribute, a_hook])
def test_functions_that_call_the_mlp_itself_are_refused(comm: Communicator, change: Any) -> None:
    """Regression: a copy had the same function, so all experts used the original MLP, which had left the model."""
    inner = mlp()
    change(inner)
    where = {over_all: "0 has a forward", over_by_default: "0 has a forward", over_a_layer: r"0\.0 has a forward",
             an_attribute: r"0\.1 has a scale", a_hook: r"0\.0 has a hook"}[change]  # fmt: skip
    with pytest.raises(UsageError, match=f"expertize: {where}.* set on the object, which calls the original"):
        expertize(around(inner), comm, plan(comm))
    expertize(around(inner), comm, plan(comm, hidden=3))


@pytest.mark.parametrize("change", [by_a_method, by_a_partial, by_a_number])
def test_functions_that_copies_own_are_accepted(comm: Communicator, change: Any) -> None:
    inner = mlp()
    change(inner)
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    expected = inner(x)
    model = expertize(around(inner), comm, plan(comm, copy=True))
    near(model(x), expected, "outputs", 1e-6)
    with torch.no_grad():
        for weight in model[0].experts.parameters():
            weight.zero_()
    assert not model(x).any()


class Own(nn.Module):
    """An MLP that initialises its layers differently from their own reset."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.up.weight, 0.5)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def test_an_mlp_initialises_its_layers_last(comm: Communicator) -> None:
    """Regression: layers were initialised last, which overwrote the values of the MLP."""
    for inner in (Own(), nn.Sequential(Own(), nn.Identity())):
        model = expertize(around(inner), comm, plan(comm))
        weights = dict(model[0].experts.named_parameters())
        up, down = (next(one for name, one in weights.items() if f"{each}.weight" in name) for each in ("up", "down"))
        assert (up == 0.5).all()
        assert not down.any()
        assert len({value for name, one in weights.items() if "bias" in name for value in one[:, 0].tolist()}) > 2


def test_an_uncopyable_layer_is_named(comm: Communicator) -> None:
    """Regression: deepcopy's own error mentioned neither experts nor the layer."""
    inner = mlp()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(inner[2])
    for options in ({}, {"copy": True}):
        with pytest.raises(UsageError, match=r"expertize: 0\.2 has a weight that is computed from other parameters"):
            expertize(around(inner), comm, plan(comm, **options))
    inner = mlp()
    inner.lines = (line for line in "ab")
    with pytest.raises(UsageError, match=r"expertize: 0 cannot be copied \(TypeError: .*generator.*hidden="):
        expertize(around(inner), comm, plan(comm))


def test_a_mixture_is_refused(comm: Communicator) -> None:
    """Regression: the error claimed that models differ among ranks."""
    model = expertize(around(mlp()), comm, plan(comm))
    with pytest.raises(UsageError, match=r"expertize: 0 is a mixture of experts already"):
        expertize(model, comm, plan(comm))
    with pytest.raises(UsageError, match=r"expertize: 0\.experts is within 0, a mixture of experts already"):
        expertize(model, comm, {"0.experts": Experts(2 * comm.size)})
    assert isinstance(model[0], MoE)


def test_a_router_with_a_moving_bias_can_be_pickled(comm: Communicator) -> None:
    """Regression: pickling failed because it cannot pickle a WeakMethod."""
    if comm.size == 1:
        return
    model = expertize(around(mlp()), comm, plan(comm, bias_rate=0.01))
    model(torch.ones(3, WIDTH, dtype=torch.float64)).sum().backward()
    auxiliary_loss(model)
    pickle.dumps(model[0].router)
    copy.deepcopy(model)
    with pytest.raises(UsageError, match="a sharded model cannot be pickled"):
        pickle.dumps(model)
