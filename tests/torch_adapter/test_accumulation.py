"""Gradient accumulation: several backward passes in one step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib_torch import DataParallel, DistributedOptimizer

from .oracle import assert_close, assert_same_everywhere, batch, gradients_of, loss_of, mine, model, parameters_of

TINY = 1e-4


def expected_gradients(comm: Any, steps: range, scale: float = 1.0) -> list[Tensor | None]:
    """Return the gradients of one process, summed over some batches."""
    network = model()
    for step in steps:
        (scale * loss_of(network, batch(comm, step))).backward()
    return gradients_of(network)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_no_sync(comm: Any, wrapper: str, op: Any, overlap: bool) -> None:
    network = model()
    syncs: Any
    if wrapper == "optimizer":
        syncs = DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1), bucket_cap_mib=TINY, op=op, overlap=overlap
        )
    else:
        syncs = DataParallel(network, bucket_cap_mib=TINY, op=op, overlap=overlap)
    for _ in range(2):
        network.zero_grad()
        with syncs.no_sync():
            loss_of(network, mine(comm, batch(comm, 0))).backward()
            local = gradients_of(network)
            loss_of(network, mine(comm, batch(comm, 1))).backward()
        if comm.size > 1:
            assert (
                len({str(everyone) for everyone in comm.all_gather_object(str(local))}) == comm.size
            )  # on one rank only
        loss_of(network, mine(comm, batch(comm, 2))).backward()
        assert_close(gradients_of(network), expected_gradients(comm, range(3), comm.size if op == "sum" else 1))
        assert_same_everywhere(comm, gradients_of(network))
        if wrapper == "optimizer":
            before = syncs.statistics.reductions
            syncs.step()
            assert syncs.statistics.reductions == before
            with torch.no_grad():
                for parameter, start in zip(network.parameters(), model().parameters(), strict=True):
                    parameter.copy_(start)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_second_backward_adds_to_reduced_gradients(comm: Any, op: Any) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), bucket_cap_mib=TINY, op=op)
    for step in range(3):
        loss_of(network, mine(comm, batch(comm, step))).backward()
        if step == 1:  # an additional local pass on one rank, between two passes that reduce
            with optimizer.no_sync():
                loss_of(network, mine(comm, batch(comm, 3))).backward()
    assert_close(gradients_of(network), expected_gradients(comm, range(4), comm.size if op == "sum" else 1))


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_backward_leaves_reduced_gradients_of_unused_parameters_alone(comm: Any, op: Any) -> None:
    """A gradient of an earlier pass counts once if the later pass does not touch its parameter."""
    scale = comm.size if op == "sum" else 1
    one, two = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
    parameters = [*one.parameters(), *two.parameters()]
    DistributedOptimizer(optimizer := torch.optim.SGD(parameters, lr=0.1), op=op)
    one(torch.full((1, 2), comm.rank + 1.0, dtype=torch.float64)).sum().backward()
    two(torch.full((1, 2), comm.rank + 5.0, dtype=torch.float64)).sum().backward()
    middle = (comm.size - 1) / 2
    assert one.weight.grad is not None and two.weight.grad is not None
    assert_close(one.weight.grad, torch.full((1, 2), scale * (middle + 1), dtype=torch.float64))
    assert_close(two.weight.grad, torch.full((1, 2), scale * (middle + 5), dtype=torch.float64))
    assert isinstance(optimizer, torch.optim.SGD)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_backward_passes_per_step(comm: Any, passes: int, overlap: bool) -> None:
    network, alone = model(), model()
    optimizer: Any = DistributedOptimizer(
        torch.optim.Adam(network.parameters()), backward_passes_per_step=passes, bucket_cap_mib=TINY, overlap=overlap
    )
    plain = torch.optim.Adam(alone.parameters())
    for window in range(3):
        for number in range(passes):
            if comm.size > 1:
                assert optimizer.statistics.reductions == window
            loss_of(network, mine(comm, batch(comm, window * passes + number))).backward()
            loss_of(alone, batch(comm, window * passes + number)).backward()
        if comm.size > 1:
            assert optimizer.statistics.reductions == window + 1
        assert_close(gradients_of(network), gradients_of(alone))  # passes are summed
        for someone in (optimizer, plain):
            someone.step()
            someone.zero_grad()
    assert_close(parameters_of(network), parameters_of(alone), 1e-10)


def test_the_last_window_may_be_shorter(comm: Any) -> None:
    """step() reduces the accumulated gradients, and the next window has its full length again."""
    network, alone = model(), model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), backward_passes_per_step=3)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for window, passes in enumerate([2, 3, 1]):
        for number in range(passes):
            loss_of(network, mine(comm, batch(comm, 10 * window + number))).backward()
            loss_of(alone, batch(comm, 10 * window + number)).backward()
        for someone in (optimizer, plain):
            someone.step()
            someone.zero_grad()
    assert_close(parameters_of(network), parameters_of(alone))
    if comm.size > 1:
        assert optimizer.statistics.reductions == 3


def test_no_sync_up_to_the_step(comm: Any) -> None:
    """If no backward reduces, step() does, so that ranks do not diverge."""
    network, alone = model(), model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    with optimizer.no_sync():
        loss_of(network, mine(comm, batch(comm))).backward()
    optimizer.step()
    loss_of(alone, batch(comm)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(parameters_of(network), parameters_of(alone))


def test_accumulation_in_parts_of_the_model(comm: Any) -> None:
    """In one step, different passes and different ranks produce gradients of different parameters."""
    network = model()
    alone = model()
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), backward_passes_per_step=2, bucket_cap_mib=TINY, overlap=True
    )
    data = batch(comm)

    def only_bias(someone: nn.Module) -> Tensor:
        return 2.0 * someone.get_parameter("4.bias").sum()

    for number in range(2):
        loss = loss_of(network, mine(comm, data)) if (comm.rank + number) % 2 else only_bias(network)
        loss.backward()
    losses = []
    for rank in range(comm.size):
        for number in range(2):
            rows = slice(4 * rank, 4 * rank + 4)
            part = (data[0][rows], data[1][rows])
            losses.append(loss_of(alone, part) if (rank + number) % 2 else only_bias(alone))
    (torch.stack(losses).sum() / comm.size).backward()
    assert_close(gradients_of(network), gradients_of(alone))
    optimizer.step()


def test_zero_grad_discards_accumulated_gradients(comm: Any) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), backward_passes_per_step=2)
    loss_of(network, mine(comm, batch(comm, 7))).backward()
    optimizer.zero_grad()
    for step in range(2):
        loss_of(network, mine(comm, batch(comm, step))).backward()
    assert_close(gradients_of(network), expected_gradients(comm, range(2)))
