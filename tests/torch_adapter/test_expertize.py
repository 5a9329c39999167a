"""MLPs of plain models become mixtures of experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch import Column, DistributedOptimizer, Row, gather_state_dict, parallelize
from commlib_torch.expert import MoE, auxiliary_loss, expertize
from tests.torch_adapter.expert_mlp import MLP, WIDTH
from tests.torch_adapter.expert_oracle import near, single


class Model(nn.Module):
    def __init__(self, sequential: bool) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mlp": mlp if sequential else MLP()}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))  # type: ignore[index]
        return x


def model(sequential: bool = False) -> Any:
    torch.manual_seed(0)
    return Model(sequential).double()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sequential", [False, True])
def test_copies_compute_what_the_dense_model_did(comm: Communicator, sequential: bool) -> None:
    """A token's gates sum to 1, so identical experts together equal the dense MLP."""
    plain = model(sequential)
    own = expertize(model(sequential), comm, {"layers.*.mlp": Experts(4 * comm.size, top_k=2, copy=True)})
    assert isinstance(own.layers[0]["mlp"], MoE)
    x = batch(comm.rank)
    near(own(x), plain(x), "outputs", 1e-6)
    auxiliary_loss(own)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("hidden", [None, 10])
def test_trains_as_on_one_rank(comm: Communicator, sequential: bool, hidden: int | None) -> None:
    plan = {"layers.*.mlp": Experts(2 * comm.size, top_k=2, hidden=hidden, shared=1 if hidden else 0)}

    def train(ranks: Any, batches: Any, **where: Any) -> Any:
        torch.manual_seed(3)
        built = expertize(model(sequential), ranks, plan)
        optimizer: Any = torch.optim.SGD(built.parameters(), 0.1)
        if where:
            optimizer = DistributedOptimizer(optimizer, built.named_parameters(), **where)
        for number in range(2):
            x = batches(number)
            (F.mse_loss(built(x), torch.sin(x)) + auxiliary_loss(built)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return built

    def all_rows(number: int) -> Tensor:
        return torch.cat([batch(10 * number + rank) for rank in range(comm.size)])

    whole = train(single(comm), all_rows)
    mesh = Mesh(dp=-1)
    own = train(mesh, lambda number: batch(10 * number + comm.rank), mesh=mesh)
    for name, value in gather_state_dict(own).items():
        near(value, whole.state_dict()[name], name)
    mesh.close()


def test_a_mesh_may_omit_the_division_of_experts(comm: Communicator) -> None:
    """As many dp ranks share the experts as divide both numbers; the others hold copies."""
    mesh = Mesh(dp=-1)
    own = expertize(model(), mesh, {"layers.*.mlp": Experts(2)})
    expected = {1: 1, 2: 2, 3: 1, 4: 2}[comm.size]
    assert own.layers[0]["mlp"].mixture.ranks.axis.size == expected
    assert own.layers[0]["mlp"].mixture.ranks is own.layers[1]["mlp"].mixture.ranks
    mesh.close()


def test_invalid_arguments_are_refused(comm: Communicator) -> None:
    plain = model()
    with pytest.raises(UsageError, match=r"no layer is called 'layers\.\*\.mpl'"):
        expertize(plain, comm, {"layers.*.mpl": Experts(4)})
    with pytest.raises(UsageError, match="expected an MLP"):
        expertize(plain, comm, {"layers.*.norm": Experts(4)})
    with pytest.raises(UsageError, match=r"copy=True or hidden="):
        expertize(plain, comm, {"layers.*.mlp": Experts(4, copy=True, hidden=3)})
    with pytest.raises(UsageError, match=r"layers.0.mlp: activation='gleu' is for built-in MLPs.*pass hidden= too"):
        expertize(plain, comm, {"layers.*.mlp": Experts(4, activation="gleu")})
    with pytest.raises(UsageError, match=r"activation 'gleu', expected a function, or one of .*did you mean 'gelu'\?"):
        expertize(plain, comm, {"layers.*.mlp": Experts(4, hidden=3, activation="gleu")})
    with pytest.raises(UsageError, match="mix: hidden=3 is for built-in MLPs, but expert= makes other experts"):
        MoE(WIDTH, Experts(comm.size, top_k=1, hidden=3), comm, expert=MLP, name="mix")
    assert isinstance(plain.layers[0]["mlp"], MLP)
    if comm.size > 1:
        with pytest.raises(UsageError, match="every rank needs at least one"):
            expertize(plain, comm, {"layers.*.mlp": Experts(1, top_k=1)})
        with pytest.raises(MismatchError):
            expertize(plain, comm, {"layers.*.mlp": Experts(4 + 4 * (comm.rank == 1))})


@pytest.mark.ranks(min=2)
def test_sharded_mlps_are_refused(comm: Communicator) -> None:
    """Regression: it was a MismatchError between the descriptions of two shards."""
    own = Model(sequential=True)
    parallelize(own, comm, {"layers.*.mlp.0": Column(), "layers.*.mlp.2": Row()})
    for copy in (False, True):
        with pytest.raises(UsageError, match=r"layers.0.mlp: 0.weight is sharded already.*expertize before parallel"):
            expertize(own, comm, {"layers.*.mlp": Experts(2 * comm.size, copy=copy)})


def test_a_wrong_name_in_a_plan_is_answered_with_names(comm: Communicator) -> None:
    """Regression: the list began with the empty name of the model itself."""
    with pytest.raises(UsageError, match="no layer is called 'xyz'; there are the model itself, layers, "):
        expertize(model(), comm, {"xyz": Experts(4)})


ACTIVATIONS: dict[str, Any] = {
    "function": F.silu,
    "builtin": torch.tanh,
    "partial": functools.partial(F.leaky_relu, negative_slope=0.1),
    "lambda": lambda x: x.sin(),
    "module": nn.SiLU(),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_ranks_agree_on_functions_as_activations(comm: Communicator, kind: str) -> None:
    """Regression: their addresses were compared, which differ on each rank."""
    act, plain = ACTIVATIONS[kind], model()
    own = expertize(plain, comm, {"layers.*.mlp": Experts(comm.size, top_k=1, hidden=3, activation=act)})
    mlp, x = own.layers[0]["mlp"].experts, batch().reshape(-1, WIDTH)
    inside = act(F.linear(x, mlp.up.weight[0], mlp.up.bias[0]))
    near(mlp.grouped(x, [len(x)]), F.linear(inside, mlp.down.weight[0], mlp.down.bias[0]), "outputs", 1e-12)


def test_an_activation_is_no_class() -> None:
    """Regression: a class was called with tokens in forward, and created a module."""
    with pytest.raises(UsageError, match=r"activation is the class SiLU, expected .*SiLU\(\)"):
        Experts(4, hidden=3, activation=nn.SiLU)


def test_differences_between_ranks_are_named(comm: Communicator) -> None:
    """Regression: only shapes were compared, so that experts of a mixture differed; options were not named."""
    if comm.size == 1:
        return
    odd = comm.rank == 1

    def refused(match: str, make: Any = None, **options: Any) -> None:
        plain = model(True)
        if make is not None:
            make(plain.layers[0]["mlp"])
        with pytest.raises(MismatchError, match=match):
            expertize(plain, comm, {"layers.*.mlp": Experts(comm.size, top_k=1, **options)})
        assert isinstance(plain.layers[0]["mlp"], nn.Sequential)

    def set_activation(mlp: Any) -> None:
        mlp[1] = nn.Tanh() if odd else nn.GELU()

    def set_values(mlp: Any) -> None:
        mlp[2].weight.data[0, 0] += odd

    def freeze(mlp: Any) -> None:
        mlp[2].weight.requires_grad = odd

    refused(r"entry \d+ is 'layers.0.mlp: jitter=0.0' on rank 0 but 'layers.0.mlp: jitter=0.1'", jitter=0.1 * odd)
    acts = (lambda x: x.sin()), (lambda x: x.cos())
    refused("layers.0.mlp: activation=.*lambda", hidden=3, activation=acts[odd])
    refused(r"layers.0.mlp.1: .*GELU.* on rank 0 but 'layers.0.mlp.1: .*Tanh\(\)' on rank 1", set_activation)
    refused("values of layers.0.mlp.2.weight", set_values, copy=True)
    refused("layers.0.mlp.2: frozen", freeze)
    own = model(True)
    set_values(own.layers[0]["mlp"])
    expertize(own, comm, {"layers.*.mlp": Experts(comm.size, top_k=1)})  # all experts are new


class Gated(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.a(x)) * self.b(x))
        return out


def test_tied_weights_of_an_mlp_are_refused(comm: Communicator) -> None:
    """Regression: tied weights came untied, and forward failed or another layer's weight changed."""
    plan = {"0": Experts(comm.size, top_k=1, copy=True)}
    with pytest.raises(UsageError, match=r"expertize: 0: a.weight and b.weight are one tied parameter"):
        expertize(nn.Sequential(Gated(True)), comm, plan)
    model: Any = nn.Sequential(Gated(False), nn.Linear(WIDTH, 12))
    model[1].weight = model[0].b.weight
    with pytest.raises(UsageError, match=r"expertize: 0: b.weight and 1.weight of the model are one tied parameter"):
        expertize(model, comm, plan)
    expertize(model, comm, {"0": Experts(comm.size, top_k=1, hidden=3)})
    with pytest.raises(UsageError, match=r"a.weight and b.weight are one tied parameter"):
        MoE(WIDTH, Experts(comm.size, top_k=1), comm, expert=lambda: Gated(True))


def test_a_layer_that_an_mlp_calls_twice_stays_one(comm: Communicator) -> None:
    torch.manual_seed(0)
    inner = nn.Linear(WIDTH, WIDTH).double()
    plain = nn.Sequential(inner, nn.Tanh(), inner)
    own = expertize(nn.Sequential(plain), comm, {"0": Experts(comm.size, top_k=1, normalise=True, copy=True)})
    near(own(batch(comm.rank)), plain(batch(comm.rank)), "outputs", 1e-6)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), None


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)


def test_errors_name_the_layer(comm: Communicator) -> None:
    """Regression: torch.cat failed on an MLP's output, and the name of the MLP's own parameter ended with a dot."""
    plan = {"0": Experts(comm.size, top_k=1)}
    with pytest.raises(UsageError, match=r"^0: an expert returned a tuple for rows \(\d+, 8\), expected a tensor"):
        expertize(nn.Sequential(Pair()), comm, plan)(batch().float())
    with pytest.raises(UsageError, match=r"^expertize: 0 has parameters, but no reset_parameters"):
        expertize(nn.Sequential(Bare()), comm, plan)


def test_experts_without_tokens_are_not_called(comm: Communicator) -> None:
    """Regression: an expert that rejects 0 rows failed on ranks without tokens, and the others waited."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 24), nn.AvgPool1d(2), nn.Linear(12, WIDTH)).double()
    plan = {"0": Experts(2 * comm.size, top_k=2, copy=True, balance="none")}
    own: Any = expertize(nn.Sequential(plain), comm, plan)
    x = batch(5)[:1, :1].requires_grad_() if comm.rank == 0 else torch.zeros(0, WIDTH, dtype=torch.float64)
    x = x.reshape(-1, WIDTH)
    out = own(x)
    near(out, plain(x) if len(x) else x, "outputs", 1e-6)
    (out.sum() + 0 * own[0].router.weight.sum()).backward()
    assert all(one.grad is not None for one in own.parameters())
    total = comm.all_reduce(own[0].experts[2].bias.grad.sum(0).numpy())
    near(torch.from_numpy(total), torch.ones(WIDTH).double(), "the gradient of a bias", 1e-6)
