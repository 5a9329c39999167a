"""State of divided models: whole names and shapes, for any number of ranks; clipping by the norm of all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_torch import clip_grad_norm_
from commlib_torch.tensor import gather_optimizer_state, gather_state_dict, load_optimizer_state, parallelize

PLAN: Any = {"up": Column(), "down": Row()}


class MLP(nn.Module):
    """A model with a weight shared by two layers, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(7, 11), nn.LayerNorm(7), nn.Linear(11, 7)
        self.register_buffer("steps", torch.tensor(seed))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(F.gelu(self.up(x))))
        return out


def data(seed: int = 1) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, limit: float = 0.0) -> list[float]:
    """Train and return the norms of the gradients."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).pow(3).mean().backward()
        if limit:
            norms.append(float(clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return norms


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_state_matches_the_whole_model(comm: Any) -> None:
    """Training continues from it in one process, or divided over another number of ranks."""
    plain, divided = MLP(), parallelize(MLP(), comm, PLAN)
    ours, theirs = adam(divided), adam(plain)
    train(plain, theirs)
    train(divided, ours)
    state = gather_state_dict(divided)
    close(state, plain.state_dict())
    kept = gather_optimizer_state(ours, divided.named_parameters())
    first = comm.rank == 0
    pair = comm.split(int(comm.rank < 2), comm.rank)  # another number of ranks, if there are more than 2
    for axis in (comm, pair):
        again = parallelize(MLP(3), axis, PLAN)
        again.load_state_dict(state)
        optimizer = adam(again)
        load_optimizer_state(optimizer, again.named_parameters(), kept)
        other = MLP(4)
        other.load_state_dict(state)
        alone = adam(other)
        load_optimizer_state(alone, other.named_parameters(), kept)
        train(again, optimizer)
        train(other, alone)
        close(gather_state_dict(again), other.state_dict())
    assert first == (comm.rank == 0)


def test_optimizer_state_is_whole(comm: Any) -> None:
    plain, divided = MLP(), parallelize(MLP(), comm, PLAN)
    ours, theirs = adam(divided), adam(plain)
    train(plain, theirs)
    train(divided, ours)
    kept = gather_optimizer_state(ours, divided.named_parameters())
    names = [name for name, _ in plain.named_parameters()]
    for name, values in zip(names, theirs.state_dict()["state"].values(), strict=True):
        close(kept["state"][name], values)


def test_optimizer_state_is_a_copy(comm: Any) -> None:
    """Regression: state of whole weights was shared with the optimizer, so that it mixed two points in time."""
    divided = parallelize(MLP(), comm, PLAN)
    optimizer = adam(divided)
    train(divided, optimizer)
    kept = gather_optimizer_state(optimizer, divided.named_parameters())
    before = copy.deepcopy(kept)
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    train(divided, optimizer)
    for name, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(kept["state"][name][key], value), (name, key)
    assert kept["param_groups"] == before["param_groups"]


def test_local_parts_can_be_loaded(comm: Any) -> None:
    divided = parallelize(MLP(), comm, PLAN)
    saved = {name: value.clone() for name, value in divided.state_dict().items()}
    train(divided, adam(divided))
    divided.load_state_dict(saved)
    close(gather_state_dict(divided), MLP().state_dict())


@pytest.mark.ranks(min=2)
def test_each_rank_may_save_its_own_file(comm: Any, tmp_path: Any) -> None:
    """Regression: torch.save of a state dict raised, and another rank's file of equal shapes was accepted."""
    divided = parallelize(MLP(), comm, PLAN)
    before = {name: value.clone() for name, value in divided.state_dict().items()}
    torch.save(divided.state_dict(), tmp_path / "own.pt")
    folders = comm.all_gather_object(str(tmp_path))
    train(divided, adam(divided))
    for loaded in (torch.load(tmp_path / "own.pt"), torch.load(tmp_path / "own.pt", weights_only=False)):
        train(divided, adam(divided), 1)
        divided.load_state_dict(loaded)
        close(dict(divided.state_dict()), before)
        train(divided, adam(divided), 1)
        divided.load_state_dict(loaded, assign=True)
        close(gather_state_dict(divided), MLP().state_dict())
    other = (comm.rank + 1) % comm.size
    comm.barrier()
    theirs = torch.load(f"{folders[other]}/own.pt")
    theirs |= {name: value for name, value in before.items() if name == "up.weight"}
    with pytest.raises(
        UsageError, match=rf"up\.bias on rank {comm.rank} of .* the shard of rank {other} of {comm.size}"
    ):
        divided.load_state_dict(theirs)
    with pytest.raises(RuntimeError, match="size mismatch"):
        MLP().load_state_dict(theirs)
    comm.barrier()


@pytest.mark.ranks(min=2)
def test_other_shapes_are_refused(comm: Any) -> None:
    divided = parallelize(MLP(), comm, PLAN)
    state = gather_state_dict(divided)
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        divided.load_state_dict({**state, "up.weight": torch.zeros(12, 7)})
    optimizer = adam(divided)
    train(divided, optimizer)
    kept = gather_optimizer_state(optimizer, divided.named_parameters())
    kept["state"]["up.weight"]["exp_avg"] = torch.zeros(12, 7)
    with pytest.raises(UsageError, match=r"exp_avg of up.weight has shape \(12, 7\), expected \(11, 7\)"):
        load_optimizer_state(optimizer, divided.named_parameters(), kept)


def test_an_optimizer_of_other_parameters_is_refused(comm: Any) -> None:
    divided, plain = parallelize(MLP(), comm, PLAN), MLP()
    state = gather_optimizer_state(adam(plain), plain.named_parameters())
    text = r"a parameter of shape \(11, 7\) that is not among the parameters of this model"
    with pytest.raises(UsageError, match=text):
        gather_optimizer_state(adam(plain), divided.named_parameters())
    with pytest.raises(UsageError, match=text):
        load_optimizer_state(adam(plain), divided.named_parameters(), state)


@pytest.mark.parametrize("limit", [0.001, 1e3])
def test_every_parameter_counts_once_in_the_norm(comm: Any, limit: float) -> None:
    plain, divided = MLP(), parallelize(MLP(), Mesh(tp=comm.size)["tp"], PLAN)
    ours = train(divided, adam(divided), 3, limit)
    theirs = train(plain, adam(plain), 3, limit)
    close(ours, theirs)
    assert ours[0] > 0.001
    assert len(set(map(tuple, comm.all_gather_object(ours)))) == 1  # the same bits on all ranks
    close(gather_state_dict(divided), plain.state_dict())


@pytest.mark.any_ranks
def test_layers_are_divided_in_turn(comm: Any) -> None:
    """Regression: with a second plan, all ranks got rank 0's parts of the layers divided by the first one."""
    axis, x = Mesh(tp=comm.size)["tp"], data()
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7), nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 7))
    whole = comm.broadcast_object({name: value.clone() for name, value in model.double().state_dict().items()})
    parallelize(model, axis, {"0": Column(), "2": Row()})
    parallelize(model, axis, {"3": Column(), "5": Row()}, example=x)
    state = gather_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in whole.items())
    plain = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7), nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 7))
    plain.double().load_state_dict(whole)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-12)


def test_swapped_arguments_are_named() -> None:
    """Regression: Python errors about attributes unknown to the user appeared."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = gather_optimizer_state(optimizer, model.named_parameters())
    with pytest.raises(
        UsageError, match=r"load_optimizer_state.*: state is a generator, expected the result of gather_opt"
    ):
        load_optimizer_state(optimizer, model.named_parameters(), model.named_parameters())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="named_parameters is a dict, expected pairs of names and parameters"):
        load_optimizer_state(optimizer, state, model.named_parameters())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"gather_optimizer_state.*: optimizer is a Linear, expected an optimizer"):
        gather_optimizer_state(model, optimizer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="named_parameters is a Linear"):
        gather_optimizer_state(optimizer, model)  # type: ignore[arg-type]
