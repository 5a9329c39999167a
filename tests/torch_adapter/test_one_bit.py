"""1-bit Adam and 1-bit LAMB on torch's parameters. Tests in tests/unit/optim cover the arithmetic."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from commlib.errors import MismatchError, UsageError
from commlib_torch import DistributedOptimizer, broadcast_optimizer_state
from commlib_torch.one_bit import OneBitAdam, OneBitLAMB

from .oracle import assert_close, assert_same_everywhere, batch, loss_of, mine, model, parameters_of

F32 = torch.float32
kinds = pytest.mark.parametrize("kind", [OneBitAdam, OneBitLAMB])
many = pytest.mark.ranks(min=2)
pytestmark = pytest.mark.filterwarnings("ignore:.*choose a larger freeze_step")  # ReLU units that are dead at first


def train(comm: Any, network: nn.Module, optimizer: Any, first: int, last: int, rows: Any = None) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        data = batch(comm, step, F32)
        loss_of(network, mine(comm, data) if rows is None else rows(data)).backward()
        optimizer.step()


def make(comm: Any, kind: Any = OneBitAdam, freeze_step: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    network = model(dtype=F32)
    options = {"lr": 0.01, "compress_within_node": True, **options}
    return network, kind(network.parameters(), freeze_step=freeze_step, **options)


@pytest.mark.parametrize("decoupled", [False, True])
def test_before_the_freeze_it_matches_adam_on_the_whole_batch(comm: Any, decoupled: bool) -> None:
    network, optimizer = make(comm, freeze_step=100, weight_decay=0.1, decoupled_weight_decay=decoupled)
    alone = model(dtype=F32)
    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = plain(alone.parameters(), lr=0.01, weight_decay=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, reference)]
    for step in range(6):
        train(comm, network, optimizer, step, step + 1)
        train(comm, alone, reference, step, step + 1, rows=lambda data: data)
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8
    # The mean over ranks of means over rows rounds differently from the mean over all rows: 2^-24 of gradients, and
    # as much for each of a few roundings; Adam divides by their size, so each of 6 steps is off by 20 of these.
    assert_close(parameters_of(network), parameters_of(alone), 6 * 20 * 2.0**-24)
    assert_same_everywhere(comm, parameters_of(network))


@kinds
def test_after_the_freeze_all_ranks_stay_equal(comm: Any, kind: Any) -> None:
    network, optimizer = make(comm, kind)
    train(comm, network, optimizer, 0, 12)
    assert_same_everywhere(comm, parameters_of(network))
    assert all(parameter.isfinite().all() for parameter in network.parameters())
    optimizer.zero_grad()
    loss_of(network, mine(comm, batch(comm, 0, F32))).backward()
    own = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    optimizer.step()
    assert_close([parameter.grad for parameter in network.parameters()], own, 0)


def test_the_loss_falls_as_with_adam(comm: Any) -> None:
    data = batch(comm, 0, F32)

    def fit(freeze_step: int) -> tuple[float, float]:
        network, optimizer = make(comm, freeze_step=freeze_step)
        start = loss_of(network, data).item()
        for _ in range(200):
            optimizer.zero_grad()
            loss_of(network, mine(comm, data)).backward()
            optimizer.step()
        return start, loss_of(network, data).item()

    start, plain = fit(1000)
    _, signs = fit(40)
    # On 1, 2 and 3 ranks they ended at 1e-7, 2e-4 and 2e-3 of the start, and at 3e-5, 5e-3 and 3e-2.
    assert plain < 0.5 * start
    assert signs < plain + 0.1 * start


@kinds
def test_half_precision_and_strided_parameters(comm: Any, kind: Any) -> None:
    weights = [
        nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).bfloat16()),
        nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).half()),
        nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).t()),
        nn.Parameter(torch.tensor(0.5)),
    ]
    optimizer = kind(weights, lr=0.1, freeze_step=2, compress_within_node=True)
    before = [weight.detach().clone() for weight in weights]
    for step in range(5):
        for weight in weights:
            weight.grad = torch.full_like(weight, step + comm.rank + 1)
        versions = [weight._version for weight in weights]
        optimizer.step()
        assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))
    for weight, old in zip(weights, before, strict=True):
        assert weight.dtype == old.dtype and weight.stride() == old.stride()
        assert (weight < old).all()
        assert optimizer.state[weight]["exp_avg"].dtype == F32
    assert_same_everywhere(comm, [weight.detach().contiguous() for weight in weights])


@kinds
@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_state_dict(comm: Any, kind: Any, at: int, dtype: torch.dtype) -> None:
    """Training resumed from a state ends with the same bits, in both phases, also in an optimizer that has stepped."""
    network, optimizer = make(comm, kind)
    network.to(dtype)

    def steps(network: nn.Module, optimizer: Any, first: int, last: int) -> None:
        train(comm, network, optimizer, first, last, lambda data: [x.to(dtype) for x in mine(comm, data)])

    steps(network, optimizer, 0, at)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    weights = copy.deepcopy(network.state_dict())
    steps(network, optimizer, at, at + 3)
    for stepped in (0, 4):
        other, resumed = make(comm, kind, lr=0.5)
        other.to(dtype)
        steps(other, resumed, 0, stepped)
        other.load_state_dict(weights)
        resumed.load_state_dict(saved)
        assert set(resumed.state_dict()["state"]) == set(saved["state"])
        steps(other, resumed, at, at + 3)
        assert_close(parameters_of(other), parameters_of(network), 0)


def test_a_state_may_come_from_another_rank(comm: Any) -> None:
    """Moments are shared by all ranks; residuals belong to one rank, and others do not take them over."""
    network, optimizer = make(comm)
    train(comm, network, optimizer, 0, 5)
    root = comm.size - 1
    broadcast_optimizer_state(optimizer, root)
    residuals = optimizer.state_dict()["state"]["one_bit"]["residuals"]
    assert any(x.any() for of in residuals.values() for x in of.values()) == (comm.rank == root and comm.size > 1)
    train(comm, network, optimizer, 5, 8)
    assert_same_everywhere(comm, parameters_of(network))


def test_a_state_of_other_shapes_is_refused(comm: Any) -> None:
    network, optimizer = make(comm)
    plain = torch.optim.Adam(network.parameters())
    train(comm, network, plain, 0, 1)
    with pytest.raises(UsageError, match="not a state of OneBitAdam"):
        optimizer.load_state_dict(plain.state_dict())
    other_network, other = make(comm, freeze_step=4)
    train(comm, other_network, other, 0, 1)
    with pytest.raises(UsageError, match="freeze_step=4, but this optimizer has 3"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.load_state_dict(make(comm)[1].state_dict())  # the state of an optimizer that has not stepped
    with pytest.raises(UsageError, match="state_dict"):
        copy.deepcopy(optimizer)


@kinds
def test_gradient_scaler(comm: Any, kind: Any) -> None:
    """If one rank overflows, in either phase, no rank steps. A scale has no effect, as it is a power of two."""
    network, optimizer = make(comm, kind)
    other, plain = make(comm, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        for overflow in (True, False) if step in (1, 4) else (False,):
            before = parameters_of(network)
            optimizer.zero_grad()
            factor = torch.inf if overflow and comm.rank == comm.size - 1 else 1.0
            scaler.scale(loss_of(network, mine(comm, batch(comm, step, F32))) * factor).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, parameters_of(network))) == overflow
        train(comm, other, plain, step, step + 1)
    assert_close(parameters_of(network), parameters_of(other), 0)
    assert_same_everywhere(comm, parameters_of(network))


def test_a_closure_and_a_rank_without_gradients(comm: Any) -> None:
    network, optimizer = make(comm, freeze_step=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(network, batch(comm, comm.rank, F32))
        if comm.rank < comm.size - 1 or comm.size == 1:
            loss.backward()
        return loss

    before = parameters_of(network)
    for _ in range(4):
        assert optimizer.step(closure).item() > 0
    assert_same_everywhere(comm, parameters_of(network))
    assert all(not torch.equal(one, other) for one, other in zip(before, parameters_of(network), strict=True))


def test_late_gradients_are_warned_of(comm: Any) -> None:
    table = nn.Embedding(4, 3)
    nn.init.ones_(table.weight)
    optimizer = OneBitAdam(table.parameters(), freeze_step=2, compress_within_node=True)
    for _ in range(4):
        optimizer.zero_grad()
        table(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
    assert (table.weight[2:] == 1).all() and (table.weight[:2] < 1).all()
    for expected in (True, False):
        optimizer.zero_grad()
        table(torch.tensor([0, 2])).sum().backward()
        if expected:
            with pytest.warns(UserWarning, match="larger freeze_step"):
                optimizer.step()
        else:
            optimizer.step()
    assert (table.weight[2:] == 1).all()


def test_a_distributed_optimizer_refuses_it(comm: Any) -> None:
    _, optimizer = make(comm)
    with pytest.raises(UsageError, match="averages over the ranks by itself"):
        DistributedOptimizer(optimizer)


@many
def test_ranks_with_different_options_are_refused(comm: Any) -> None:
    network, optimizer = make(comm, freeze_step=2 + comm.rank)
    with pytest.raises(MismatchError, match=r"OneBitAdam.*freeze_step"):
        train(comm, network, optimizer, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_step": 0}, "freeze_step"),
        ({"lr": -1}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_wrong_options(comm: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(comm, **options)


@kinds
def test_parameters_on_other_devices_are_refused_with_the_reason(comm: Any, kind: Any) -> None:
    with FakeTensorMode():  # a device that this machine need not have
        parameter = nn.Parameter(torch.empty(2, 3, device="xpu"))
        with pytest.raises(UsageError, match=rf"{kind.__name__} updates .* of shape \(2, 3\) is on xpu:0"):
            kind([parameter], freeze_step=1)
        kind([nn.Parameter(torch.empty(2, 3, device="cuda"))], freeze_step=1)  # these are copied


def test_wrong_parameters(comm: Any) -> None:
    with pytest.raises(UsageError, match="got float64"):
        OneBitAdam(model().parameters(), freeze_step=1)
    network, optimizer = make(comm)
    train(comm, network, optimizer, 0, 1)
    with pytest.raises(UsageError, match="before the first step"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    table = nn.Embedding(3, 2, sparse=True)
    sparse = OneBitAdam(table.parameters(), freeze_step=1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        sparse.step()
