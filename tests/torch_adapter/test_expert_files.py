"""Files of experts contain the whole optimizer state: after loading, training matches plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch import DistributedOptimizer, gather_optimizer_state
from commlib_torch._shards import shard_of
from commlib_torch.expert import MoE, load_experts, rebalance_experts, save_experts
from tests.torch_adapter.expert_oracle import single

O = torch.optim  # noqa: E741
WIDTH = 4


class Own(O.Optimizer):
    """A user's optimizer whose state has one value per element, a number, and nothing for some parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                kept = self.state[one]
                if not kept:
                    kept.update(step=0, sign=torch.zeros_like(one), nothing=None)
                kept["step"] += 1
                kept["sign"].mul_(0.5).add_(one.grad.sign())
                one.sub_(group["lr"] / kept["step"] * kept["sign"])


class Rows(Own):
    """An optimizer with state for each row of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["rows"] = one.grad.reshape(len(one), -1).norm(dim=1)


class Named(O.Adam):
    """PyTorch's Adam, under a name of the user's."""


MAKERS: dict[str, Callable[[Any], Any]] = {
    "amsgrad": lambda ps: O.AdamW(ps, 0.01, amsgrad=True),
    "RMSprop": lambda ps: O.RMSprop(ps, 0.01, momentum=0.9, centered=True),
    "SGD": lambda ps: O.SGD(ps, 0.1, momentum=0.9),
    "NAdam": lambda ps: O.NAdam(ps, 0.01),
    "ASGD": lambda ps: O.ASGD(ps, 0.01, t0=2),
    "own": lambda ps: Own(ps, 0.1),
    "Named": lambda ps: Named(ps, 0.01),
    "RAdam": lambda ps: O.RAdam(ps, 0.01),
    "Adagrad": lambda ps: O.Adagrad(ps, 0.1),
    "Adadelta": lambda ps: O.Adadelta(ps, 0.1),
    "Adamax": lambda ps: O.Adamax(ps, 0.01),
    "Rprop": lambda ps: O.Rprop(ps, 0.01),
    "plain SGD": lambda ps: O.SGD(ps, 0.1),
    "foreach": lambda ps: O.Adam(ps, 0.01, foreach=True),
    "fused": lambda ps: O.Adam(ps, 0.01, fused=True),
}


def build(comm: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return MoE(WIDTH, Experts(4, hidden=3, shared=1, bias_rate=0.1), comm).double()


def whole_gradients(number: int, shapes: list[Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def step(parameters: Any, optimizer: Any, numbers: Any) -> None:
    """Update with random gradients."""
    own = list(parameters)
    shards = [shard_of(one) for one in own]
    shapes = [one.shape if shard is None else shard.sharding.shape for one, shard in zip(own, shards, strict=True)]
    for number in numbers:
        for one, shard, gradient in zip(own, shards, whole_gradients(number, shapes), strict=True):
            one.grad = gradient if shard is None else torch.from_numpy(shard.own(gradient.numpy()))
        optimizer.step()


def same(comm: Communicator, path: Path) -> str:
    return str(comm.broadcast_object(str(path)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_file_continues_training(comm: Communicator, tmp_path: Path, name: str) -> None:
    """Regression: Amsgrad's maxima and RMSprop's state were lost: the next step raised KeyError or started afresh."""
    if comm.size == 3:
        pytest.skip("4 experts")
    make, path = MAKERS[name], same(comm, tmp_path / "experts")
    model = build(comm)
    whole = [
        nn.Parameter(one.detach().clone() if shard is None else torch.from_numpy(shard.whole(one.detach().numpy())))
        for one in model.parameters()
        for shard in [shard_of(one)]
    ]
    plain, optimizer = make(whole), make(model.parameters())
    step(model.parameters(), optimizer, range(3))
    step(whole, plain, range(6))
    save_experts(path, model, optimizer)
    comm.barrier()
    for ranks, steps in ((comm, [100]), (comm, []), (single(comm), [])):
        other = build(ranks, 2)
        loaded = make(other.parameters())
        step(other.parameters(), loaded, steps)  # its state so far is discarded
        load_experts(path, other, loaded)
        assert torch.equal(other.expert_bias, model.expert_bias)
        step(other.parameters(), loaded, range(3, 6))
        for weight, expected in zip(other.parameters(), whole, strict=True):
            shard = shard_of(weight)
            mine = expected if shard is None else torch.from_numpy(shard.own(expected.detach().numpy()))
            torch.testing.assert_close(weight.detach(), mine.detach(), rtol=1e-10, atol=1e-10)


def test_state_of_another_optimizer_is_refused(comm: Communicator, tmp_path: Path) -> None:
    """Regression: it was ignored or stored under an unused key. Different settings are refused, too."""
    if comm.size == 3:
        pytest.skip("4 experts")
    path = same(comm, tmp_path / "experts")
    model = build(comm)
    optimizer = O.Adam(model.parameters(), 0.01)
    step(model.parameters(), optimizer, range(1))
    save_experts(path, model, optimizer)
    comm.barrier()
    for name in ("SGD", "amsgrad", "plain SGD", "own", "RMSprop"):
        other = build(comm, 2)
        wrong = MAKERS[name](other.parameters())
        before = [one.detach().clone() for one in other.parameters()]
        with pytest.raises(UsageError, match=r"layer 0 \(MoE\): the optimizer state of router in the file is first"):
            load_experts(path, other, wrong)
        assert all(map(torch.equal, other.parameters(), before)) and not wrong.state
        load_experts(path, other)
        assert torch.equal(other.router.weight, model.router.weight)
    distributed = DistributedOptimizer(O.Adam(other.parameters(), 0.01), other.named_parameters(), ranks=comm)
    load_experts(path, other, distributed)
    expert, of = next(model.experts.parameters()), next(other.experts.parameters())
    assert torch.equal(distributed.state[of]["exp_avg"], optimizer.state[expert]["exp_avg"])


def test_state_without_elements_is_refused(comm: Communicator, tmp_path: Path) -> None:
    """Such state cannot be assigned to experts."""
    model = build(comm) if comm.size != 3 else build(single(comm))
    optimizer = Rows(model.parameters(), 0.1)
    step(model.parameters(), optimizer, range(1))
    with pytest.raises(UsageError, match=r"save_experts: the Rows state rows of router is a tensor of shape \[4\]"):
        save_experts(same(comm, tmp_path / "experts"), model, optimizer)


@pytest.mark.ranks(min=2)
def test_ranks_with_different_optimizers_are_refused(comm: Communicator, tmp_path: Path) -> None:
    """Regression: one rank's momentum and another's first moments were gathered into one array."""
    if comm.size == 3:
        pytest.skip("4 experts")
    model = build(comm)
    optimizer = MAKERS["SGD" if comm.rank else "amsgrad"](model.parameters())
    step(model.parameters(), optimizer, range(1))
    with pytest.raises(MismatchError, match=r"save_experts: .*router/"):
        save_experts(same(comm, tmp_path / "experts"), model, optimizer)


def test_state_is_gathered_in_any_order(comm: Communicator, tmp_path: Path) -> None:
    """Regression: loaded state had a different order on each rank, and moments of different parameters were mixed."""
    if comm.size == 3:
        pytest.skip("4 experts")
    model = build(comm)
    optimizer = MAKERS["amsgrad"](model.parameters())
    step(model.parameters(), optimizer, range(2))
    before = gather_optimizer_state(optimizer, model.named_parameters())["state"]
    save_experts(path := same(comm, tmp_path / "experts"), model, optimizer)
    other = build(comm, 2)
    loaded = MAKERS["amsgrad"](other.parameters())
    load_experts(path, other, loaded)
    for parameter, kept in list(loaded.state.items()):  # as if hashes of names differed among ranks
        keys = list(kept) if comm.rank % 2 else list(reversed(kept))
        loaded.state[parameter] = {key: kept[key] for key in keys}
    after = gather_optimizer_state(loaded, other.named_parameters())["state"]
    assert before.keys() == after.keys()
    for name, kept in before.items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(after[name][key])) for key, value in kept.items()
        )


@pytest.mark.ranks(min=2)
def test_state_of_different_optimizers_is_not_gathered(comm: Communicator) -> None:
    """Regression: a rank without state made the others wait, or contributed the wrong values."""
    if comm.size == 3:
        pytest.skip("4 experts")
    model = build(comm)
    optimizer = MAKERS["SGD" if comm.rank else "amsgrad"](model.parameters())
    step(model.parameters(), optimizer, range(1))
    with pytest.raises(MismatchError, match=r"gather_optimizer_state: .*experts.*exp_avg"):
        gather_optimizer_state(optimizer, model.named_parameters())


def test_a_model_without_mixtures_is_refused(comm: Communicator, tmp_path: Path) -> None:
    plain: Any = nn.Linear(2, 2)
    path: Any = same(comm, tmp_path / "experts")
    calls: dict[str, Any] = {
        "save_experts": lambda model: save_experts(path, model),
        "load_experts": lambda model: load_experts(path, model),
        "rebalance_experts": rebalance_experts,
    }
    for verb, call in calls.items():
        with pytest.raises(UsageError, match=f"{verb}: Linear has no mixture of experts"):
            call(plain)
        with pytest.raises(UsageError, match=f"{verb}: model must be a torch Module, got '.*experts'"):
            call(path)
