"""A mixture of experts over several ranks matches the same layer on one rank that has all tokens."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.init import normal_ as taken_before

from commlib import Communicator
from commlib.errors import PeerError, UsageError
from commlib.expert import Experts
from commlib_torch import gather_state_dict
from commlib_torch._shards import shard_of
from commlib_torch.expert import MoE, auxiliary_loss, expert_stats
from tests.torch_adapter.expert_oracle import build_layer, compare_gradients, layer, near, single, step, tokens


def check(comm: Communicator, options: Any, rows: list[int] | None = None, **kwargs: Any) -> None:
    xs = tokens(comm, rows=rows)
    model, whole = build_layer(layer(options, **kwargs), comm), build_layer(layer(options, **kwargs), single(comm))
    y, loss, of_x = step(model, xs[comm.rank])
    # The loss of one process is a mean over all tokens; those of ranks are means over their own, summed here.
    expected, whole_loss, of_all = step(whole, torch.cat(xs), float(comm.size))
    first = sum(len(x) for x in xs[: comm.rank])
    mine = slice(first, first + len(xs[comm.rank]))
    near(y, expected[mine], "outputs")
    if rows is None:
        mean = comm.all_reduce(loss.reshape(1).numpy(), "mean")
        near(torch.from_numpy(mean), whole_loss.reshape(1), "auxiliary loss")
    near(of_x, of_all[mine], "gradient of the inputs")
    compare_gradients(comm, model, whole)


OPTIONS: dict[str, Any] = {
    "top-1": {"top_k": 1},
    "top-2": {"top_k": 2},
    "top-3": {"top_k": 3},
    "sigmoid": {"top_k": 2, "scores": "sigmoid"},
    "gated": {"top_k": 2, "gated": True, "activation": "silu", "bias": False},
    "shared": {"top_k": 1, "shared": 2},
    "z": {"top_k": 2, "z_weight": 0.1},
    "global": {"top_k": 2, "balance": "global"},
    "capacity": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all"},
    "random": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all", "drop": "random"},
    "probable": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all", "drop": "probability"},
    "expert choice": {"top_k": 2, "choice": "expert", "capacity_over": "all", "balance": "none"},
    "groups": {"top_k": 2, "groups": 3, "max_groups": 1},
    "parts": {"top_k": 2, "chunks": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_one_rank(comm: Communicator, name: str) -> None:
    check(comm, Experts(6, hidden=10, **OPTIONS[name]))


def test_ranks_may_have_different_numbers_of_tokens(comm: Communicator) -> None:
    """A rank without tokens still takes part."""
    for chunks in (1, 2):
        check(comm, Experts(6, hidden=10, balance="none", chunks=chunks), rows=[4, 0, 1, 2])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 7), nn.Linear(7, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def test_any_module(comm: Communicator) -> None:
    check(comm, Experts(6, top_k=2), expert=Own)


class Adapted(nn.Linear):
    """A linear layer with a parallel low-rank branch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


def test_subclasses_of_linear_are_called(comm: Communicator) -> None:
    """Regression: they were computed as linear layers, all experts of a rank at once."""
    options = Experts(6, top_k=2, balance="none")
    model: Any = build_layer(
        layer(options, expert=lambda: nn.Sequential(Adapted(12, 4), nn.GELU(), nn.Linear(4, 12))), comm
    )
    x = tokens(comm)[comm.rank].requires_grad_()
    model(x).sum().backward()
    stacks = dict(model.experts.named_parameters())
    assert all((stack.grad is None) == (name == "0.weight") for name, stack in stacks.items())
    with torch.no_grad():
        folded: Any = build_layer(
            layer(options, expert=lambda: nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 12))), comm
        )
        for name, stack in folded.experts.named_parameters():
            stack.copy_(stacks[name] + (stacks["0.b"] @ stacks["0.a"] if name == "0.weight" else 0))
    near(model(x), folded(x), "outputs", 1e-9)
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    near(torch.func.functional_call(model, values, (x,)), folded(x), "outputs", 1e-9)


@pytest.mark.parametrize("built_in", [True, False])
def test_hooks_of_experts_run_and_replaced_layers_are_refused(comm: Communicator, built_in: bool) -> None:
    """Regression: hooks were ignored, and so were replaced layers with a weight."""
    options = Experts(6, top_k=2, hidden=4 if built_in else None)
    expert = None if built_in else lambda: nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 12))
    model: Any = build_layer(layer(options, expert=expert, name="mix"), comm)
    x = tokens(comm)[comm.rank]
    y = model(x)
    inner = model.experts.up if built_in else model.experts[0]
    seen: list[int] = []
    handle = inner.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    near(model(x), y, "outputs", 1e-9)
    assert len(seen) == len(model.mixture.placement.of_rank(model.mixture.ranks.axis.rank))
    assert sum(comm.all_gather_object(sum(seen))) == 2 * 15 * comm.size
    handle.remove()
    adapted = Adapted(12, 4).double()
    adapted.weight, adapted.bias = inner.weight, inner.bias
    if built_in:
        model.experts.up = adapted
    else:
        model.experts[0] = adapted
    with pytest.raises(UsageError, match=r"mix: parameter (up|0)\.\w+ was added after the experts were made"):
        model(x)


def doubled(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = 2 * type(module).forward(module, x)
    return out


@pytest.mark.parametrize("where", ["experts.down", "experts.2", "experts"])
def test_patched_forwards_are_used(comm: Communicator, where: str) -> None:
    """Quantisers, offloading and adapters patch forwards. Regression: the product of all experts ignored them."""
    own = None if where == "experts.down" else lambda: nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 12))
    model: Any = build_layer(layer(Experts(6, top_k=2, hidden=None if own else 4), expert=own), comm)
    x = tokens(comm)[comm.rank]
    y = model(x)
    module = model.get_submodule(where)
    module.forward = types.MethodType(doubled, module)
    near(model(x), 2 * y, "outputs", 1e-9)


INITIALISED: dict[str, Callable[[Any], object]] = {
    "normal": lambda linear: nn.init.normal_(linear.weight, std=0.02),
    "taken before": lambda linear: taken_before(linear.weight),
    "xavier": lambda linear: nn.init.xavier_uniform_(linear.weight),
    "reset_parameters": lambda linear: linear.reset_parameters(),
}


@pytest.mark.parametrize("how", INITIALISED)
def test_experts_can_be_reinitialised(comm: Communicator, how: str) -> None:
    """Regression: experts on different ranks were copies of each other, scaled by the size of their stack."""
    results = []
    for ranks in (comm, single(comm)):
        model = build_layer(layer(Experts(6, top_k=2, hidden=4)), ranks)
        torch.manual_seed(5)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                INITIALISED[how](module)
        results.append(gather_state_dict(model))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    fan = (12 + 4) / 6 if how == "xavier" else 12.0  # variances: 6 / (in + out) / 3, or 1 / in / 3
    expected = 0.02 if how == "normal" else 1.0 if how == "taken before" else (1 / fan / 3) ** 0.5
    spread = results[0]["experts.up.weight"].std()  # of 288 numbers
    assert 0.8 * expected < spread < 1.2 * expected


def test_an_initialisation_that_rejects_one_expert(comm: Communicator) -> None:
    model: Any = build_layer(layer(Experts(6, top_k=2, hidden=4)), comm)
    with pytest.raises(ValueError, match="fewer than 2 dimensions") as caught:
        nn.init.xavier_uniform_(model.experts.up.bias)
    assert "one of 6 experts" in caught.value.__notes__[0]


class LowRank(nn.Module):
    """A linear layer and an adapter with the layer's weight, as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(12, 2, bias=False), nn.Linear(2, 6, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 3 * self.b(self.a(x))
        return out


@pytest.mark.parametrize("how", ["hook", "forward", "adapter", "bias", "half"])
def test_modified_routers_are_called(comm: Communicator, how: str) -> None:
    """Regression: only their own weight was used, and other parts were ignored."""
    model: Any = build_layer(layer(Experts(6, top_k=1, hidden=4)), comm)
    x = tokens(comm)[comm.rank].requires_grad_()
    torch.manual_seed(3)
    if how == "hook":
        model.router.register_forward_hook(lambda module, args, out: 2 * out)
    elif how == "forward":
        model.router.forward = types.MethodType(doubled, model.router)
    elif how == "bias":
        weight = model.router.weight
        model.router = nn.Linear(12, 6).double()
        model.router.weight = weight
    else:
        model.router = LowRank(model.router).to(torch.bfloat16 if how == "half" else torch.float64)
    router = copy.deepcopy(model.router).float()  # the dtype in which it computes
    state = gather_state_dict(model)
    logits = router(x.float())
    gates, chosen = torch.softmax(logits, -1).max(-1)
    stacks = {name: state[f"experts.{name}"][chosen] for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    inside = F.gelu(torch.einsum("...w,...hw->...h", x, stacks["up.weight"]) + stacks["up.bias"])
    expected = torch.einsum("...h,...wh->...w", inside, stacks["down.weight"]) + stacks["down.bias"]
    expected = expected * gates[..., None]
    near(model(x), expected, "outputs", 1e-6)
    model(x).sum().backward()
    expected.sum().backward()
    for (name, own), one in zip(model.router.named_parameters(), router.parameters(), strict=True):
        near(own.grad.float(), one.grad, f"gradient of router.{name}", 2e-2 if how == "half" else 1e-5)


def test_a_router_without_a_score_for_each_expert(comm: Communicator) -> None:
    model: Any = build_layer(layer(Experts(6, top_k=1, hidden=4), name="mix"), comm)
    model.router = nn.Linear(12, 5, bias=False).double()
    with pytest.raises(UsageError, match=r"mix: the router returned \(15, 5\) for 15 tokens, expected .* 6 experts"):
        model(tokens(comm)[comm.rank])


def test_unused_experts_have_zero_gradients(comm: Communicator) -> None:
    model: Any = build_layer(layer(Experts(6, top_k=1, hidden=4, balance="none")), comm)
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.weight[0] += 1
    x = torch.ones(3, 12, dtype=torch.float64)
    step(model, x)
    for parameter in model.experts.parameters():
        assert parameter.grad is not None
        if comm.size > 1 and comm.rank > 0:
            assert not parameter.grad.any()
    assert not auxiliary_loss(model).requires_grad


def test_stats(comm: Communicator) -> None:
    """The tokens of all ranks count; statistics and the timeline use the layer's name."""
    model: Any = build_layer(layer(Experts(6, top_k=2, hidden=4, force_balanced=True), name="one"), comm)
    for _ in range(2):
        model(tokens(comm)[comm.rank][:, :3])
    auxiliary_loss(model)
    ((name, stats),) = expert_stats(nn.Sequential(model)).items()
    assert name == "one"
    assert stats.tokens == 18 * comm.size
    assert stats.load == pytest.approx([1 / 6] * 6)
    assert stats.imbalance == pytest.approx(1)
    assert stats.drop_rate == 0
    assert 0 < stats.entropy <= np.log(6)
    assert stats.bars(8).splitlines()[0] == "   0 ████████  16.7%"
    assert model.stats().tokens == 0


def test_balance_without_a_loss(comm: Communicator) -> None:
    """After each step the bias for choosing experts moves towards even load, identically on all ranks."""
    options = Experts(6, top_k=1, hidden=4, balance="none", bias_rate=0.05)
    model: Any = build_layer(layer(options), comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = tokens(comm)[comm.rank]
    with torch.no_grad():
        model.router.weight[0] += 1.0 * x.mean((0, 1))  # many tokens prefer this one
    loads = []
    for _ in range(80):
        for part in x.split(2):  # the passes of a step count together
            model(part).sum().backward()
        before = model.expert_bias.clone()
        load = model.mixture.load.copy()
        optimizer.step()
        expected = comm.all_reduce(load)
        near(model.expert_bias, before + 0.05 * torch.from_numpy(np.sign(expected.mean() - expected)), "bias", 1e-6)
        loads.append(expected.max() / expected.mean())
    assert np.mean(loads[-20:]) < np.mean(loads[:5])
    assert len(set(map(str, comm.all_gather_object(model.expert_bias.tolist())))) == 1


def test_copies_share_their_channels(comm: Communicator) -> None:
    model: Any = build_layer(layer(Experts(6, hidden=4)), comm)
    twin = copy.deepcopy(model)
    x = tokens(comm)[comm.rank]
    near(twin(x), model(x), "outputs", 0.0)
    assert twin.mixture.exchange is model.mixture.exchange
    assert shard_of(twin.experts.up.weight) is not None
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(model)


def test_backward_twice(comm: Communicator) -> None:
    """Several losses may be differentiated through one forward."""
    model: Any = build_layer(layer(Experts(6, hidden=4)), comm)
    x = tokens(comm)[comm.rank].requires_grad_()
    y = model(x)
    one = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    two = torch.autograd.grad((2 * y).sum(), x)[0]
    near(two, 2 * one, "gradient", 1e-9)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum(), x)


def test_half_precision(comm: Communicator) -> None:
    """The router always computes in float32, so that tokens go to the same experts as in float32."""
    options = Experts(6, top_k=2, hidden=16, gated=True)
    model: Any = build_layer(layer(options), comm).float()
    x = tokens(comm)[comm.rank].float()
    expected = model(x.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.bfloat16())
    assert y.dtype == torch.bfloat16
    near(y.float(), expected, "outputs", 0.03)
    for what in (torch.float16, torch.bfloat16):
        half = copy.deepcopy(model).to(what)
        z = half(x.to(what).requires_grad_())
        z.float().sum().backward()
        assert z.dtype == what
        near(z.float(), expected, "outputs", 0.06)


def test_the_bias_for_choosing_stays_exact(comm: Communicator) -> None:
    """Regression: bfloat16 lost steps of 0.001 above 0.25, and casts of the model rounded the bias."""
    model: Any = build_layer(layer(Experts(6, hidden=4, bias_rate=0.001)), comm).float()
    exact = torch.linspace(-0.5, 0.5, 6) / 3
    with torch.no_grad():
        model.expert_bias.copy_(exact)
    for cast in (nn.Module.bfloat16, nn.Module.half, lambda one: one.to(torch.bfloat16), nn.Module.float):
        around: Any = nn.Sequential(copy.deepcopy(model))
        for _ in range(2):
            cast(around)
        assert around[0].expert_bias.dtype == torch.float32
        assert around[0].router.weight.dtype == around[0].experts.up.weight.dtype
        assert torch.equal(around[0].expert_bias, exact)
        assert torch.equal(copy.deepcopy(around).state_dict()["0.expert_bias"], exact)
    half = copy.deepcopy(model).bfloat16()
    state = {name: value.bfloat16() for name, value in model.state_dict().items() if name == "expert_bias"}
    for assign in (False, True):
        half.load_state_dict(state, strict=False, assign=assign)
        assert half.expert_bias.dtype == torch.float32
        near(half.expert_bias, exact, "bias", 0.01)
    half.load_state_dict(model.state_dict())
    assert torch.equal(half.expert_bias, exact)
    x = tokens(comm)[comm.rank].bfloat16()
    half(x).float().sum().backward()
    load = comm.all_reduce(half.mixture.load.copy())
    torch.optim.SGD(half.parameters(), 0.0).step()
    near(half.expert_bias, exact + 0.001 * torch.from_numpy(np.sign(load.mean() - load)).float(), "bias", 1e-7)
    assert model.double().expert_bias is not None


def test_masked_tokens_are_not_sent(comm: Communicator) -> None:
    model: Any = build_layer(layer(Experts(6, hidden=4)), comm)
    x = tokens(comm)[comm.rank]
    mask = torch.arange(5).expand(len(x), 5) < 3
    y = model(x, mask)
    loss = auxiliary_loss(model)
    assert not y[:, 3:].any()
    near(y[:, :3], model(x[:, :3]), "outputs", 1e-6)
    near(loss, auxiliary_loss(model), "loss", 1e-6)
    assert model.stats().tokens == 2 * 9 * comm.size


class Raises(nn.Linear):
    on = -1
    """The rank on which it does."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(6, 6)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        if Raises.on == self.comm.rank:
            raise ArithmeticError("no memory")
        return super().forward(x)


def test_an_error_of_an_expert_reaches_all_ranks(comm: Communicator) -> None:
    """Regression: the others waited. Now all continue with the next call."""
    names = ["first", "second"]
    model = nn.Sequential(
        *(MoE(6, Experts(2 * comm.size), comm, expert=lambda: Raises(comm), name=name) for name in names)
    )
    x = torch.ones(3, 6)
    before = model(x)
    for rank in range(2 if comm.size > 1 else 0):
        Raises.on = rank
        others = rf"first: experts of rank {rank} of .* raised ArithmeticError: no memory"
        if comm.rank == rank:
            with pytest.raises(ArithmeticError):
                model(x)
        else:
            with pytest.raises(PeerError, match=others):
                model(x)
        Raises.on = -1
        again = model(x)
        assert torch.equal(again, before)
        again.sum().backward()
