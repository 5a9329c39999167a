"""MLPs that refer to layers and weights of others: experts share these, or the MLP is refused by name."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Communicator, Mesh
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib_torch import DistributedOptimizer
from commlib_torch.expert import expertize
from tests.torch_adapter.expert_mlp import MLP, WIDTH
from tests.torch_adapter.expert_oracle import near


class Referring(MLP):
    """An MLP that first calls whatever it was configured to call."""

    def put(self, kept: Any, get: Any) -> None:
        self.kept, self.get = kept, get

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.get(self.kept)(x))


class Scaling(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.kept = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept[0]


def first(kept: Any) -> Any:
    return kept[0]


def value_of(kept: Any) -> Any:
    return kept.a["b"]


def itself(kept: Any) -> Any:
    return kept


def called(kept: Any) -> Any:
    return kept()


def scaled(kept: Any) -> Any:
    return functools.partial(torch.mul, kept[0])


def of_parent(kept: Any) -> Any:
    return kept[0].norm


PUTS = {
    "list": (lambda model: [model.norm], first),
    "namespace": (lambda model: types.SimpleNamespace(a={"b": model.norm}), value_of),
    "method": (lambda model: model.norm.forward, itself),
    "closure": (lambda model: lambda: model.norm, called),
    "weak": (lambda model: weakref.ref(model.norm), called),
    "weight": (lambda model: [model.scale], scaled),
    "parent": (lambda model: [model], of_parent),
    "wrapped": (lambda model: [nn.Sequential(model.norm, nn.Identity())], first),
}


class Model(nn.Module):
    def __init__(self, put: str, *, trained: bool = True) -> None:
        super().__init__()
        self.norm, self.scale, self.mlp = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH)), Referring()
        make, get = PUTS[put]
        if put != "closure":
            self.mlp.put(make(self), get)
        else:
            norm = self.norm
            self.mlp.put(lambda: norm, get)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


def plan(comm: Communicator, **options: Any) -> dict[str, Experts]:
    return {"mlp": Experts(2 * comm.size, **options)}


@pytest.mark.parametrize("put", PUTS)
def test_external_layers_are_trained_as_in_one_process(comm: Communicator, put: str) -> None:
    """Regression: each expert had a copy that was never trained."""
    torch.manual_seed(0)
    plain = Model(put).double()
    with torch.no_grad():
        plain.norm.weight.uniform_(0.5, 1.5)
        plain.scale.uniform_(0.5, 1.5)
    torch.manual_seed(0)
    own = Model(put).double()
    own.load_state_dict(plain.state_dict())
    mesh = Mesh(dp=-1)
    own = expertize(own, mesh, plan(comm, top_k=2 * comm.size, copy=True, balance="none"))
    optimizer = DistributedOptimizer(torch.optim.SGD(own.parameters(), 0.5), own.named_parameters(), mesh=mesh)
    expected = torch.optim.SGD(plain.parameters(), 0.5)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(comm.size, 5, WIDTH, dtype=torch.float64, generator=generator)
        F.mse_loss(plain(x), torch.sin(x)).backward()
        F.mse_loss(own(x[comm.rank]), torch.sin(x[comm.rank])).backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
        if step == 0:  # otherwise experts drift away by a factor that the MLP lacks
            for name in ("norm.weight", "norm.bias", "scale"):
                near(own.get_parameter(name), plain.get_parameter(name), name)
    assert sum(isinstance(one, nn.LayerNorm) for one in own.modules()) == 1
    copied = copy.deepcopy(own)
    assert copied.norm is not own.norm
    mesh.close()


class ByClass(MLP):
    table: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.key = len(self.table)
        self.table[self.key] = [self.up, self.down]

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.table[self.key]
        out: Tensor = down(F.gelu(up(x)))
        return out


TABLE: dict[int, Any] = {}


def layers_of(key: int) -> Any:
    return TABLE[key]


class ByModule(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.key = len(TABLE)
        TABLE[self.key] = [self.up, self.down]

    def forward(self, x: Tensor) -> Tensor:
        up, down = layers_of(self.key)
        out: Tensor = down(F.gelu(up(x)))
        return out


class ByWeakTable(MLP):
    table: Any = weakref.WeakKeyDictionary()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.table[self] = weakref.ref(self.up)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.table[self]()(x)))
        return out


class ByWeakReference(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = weakref.ref(self.up)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.kept()(x)))
        return out


class Registered(MLP):
    """Its class lists all instances, but none of them uses the list."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ByClass, "0, ByClass, has a table in its class, which leads to layers or weights of the MLP"),
        (ByModule, "0, ByModule, has a forward in its class, which leads to layers or weights of the MLP"),
        (ByWeakTable, "0, ByWeakTable, has a table in its class, which leads to layers or weights of the MLP"),
        (ByWeakReference, "0 has a kept set on the object, which calls the original"),
    ],
)
def test_mlps_that_look_up_their_layers_are_refused(comm: Communicator, kind: Any, text: str) -> None:
    """Regression: all experts used the layers of the MLP that they were copied from."""
    with pytest.raises(UsageError, match=f"expertize: {text}"):
        expertize(nn.Sequential(kind()), comm, {"0": Experts(2 * comm.size)})
    expertize(nn.Sequential(kind()), comm, {"0": Experts(2 * comm.size, hidden=3)})


def test_classes_that_list_their_modules_are_accepted(comm: Communicator) -> None:
    expertize(nn.Sequential(Registered()), comm, {"0": Experts(2 * comm.size)})


def test_layers_that_experts_cannot_share_are_refused(comm: Communicator) -> None:
    model: Any = Model("list")
    model.norm = nn.BatchNorm1d(WIDTH)
    model.mlp.put([model.norm], first)
    with pytest.raises(
        UsageError, match="leads to a BatchNorm1d that is not the MLP's own, with a buffer, running_mean"
    ):
        expertize(model, comm, plan(comm))
    two: Any = nn.Sequential(MLP(), Referring(), nn.LayerNorm(WIDTH))
    two[1].put([two[0]], first)
    options = Experts(2 * comm.size)
    with pytest.raises(UsageError, match="1 has a kept, which leads to a layer or weight of another MLP of the plan"):
        expertize(two, comm, {"0": options, "1": options})
    expertize(two, comm, {"1": options})
    assert two[1].experts.kept[0] is two[0]


def test_layers_derived_from_an_mlps_own_are_copied_with_them(comm: Communicator) -> None:
    model: Any = Model("list")
    model.mlp.put([nn.Sequential(model.norm, model.mlp.up, nn.Identity())], lambda kept: kept[0])
    model.mlp.forward = types.MethodType(lambda self, x: self.down(self.kept[0](x)), model.mlp)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    expected = model(x)
    built = expertize(model, comm, plan(comm, copy=True))
    near(built(x), expected, "outputs", 1e-5)
    inside = built.mlp.experts.kept[0]
    assert inside[0] is built.norm
    assert inside[1] is built.mlp.experts.up


def test_parametrized_layers_are_copied(comm: Communicator) -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)).double()
    nn.utils.parametrizations.weight_norm(inner[0])
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    expected = inner(x)
    built = expertize(nn.Sequential(inner), comm, {"0": Experts(2 * comm.size, copy=True)})
    near(built(x), expected, "outputs", 1e-5)
