"""Process sets: operations on some of the ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib_torch as hvd
from commlib.errors import UsageError

from .oracle import assert_close, assert_same_everywhere, batch, loss_of, mine, model, parameters_of
from .values import check, of, share

RANKS = [0, 2]


@pytest.fixture
def pair() -> Iterator[hvd.ProcessSet]:
    """Ranks 0 and 2."""
    process_set = hvd.add_process_set(RANKS)
    yield process_set
    assert hvd.remove_process_set(process_set)


@pytest.mark.ranks(min=3)
def test_every_verb(comm: Any, pair: hvd.ProcessSet) -> None:
    assert pair.included() == (comm.rank in RANKS) and pair.size() == 2
    if comm.rank not in RANKS:
        with pytest.raises(UsageError, match=f"rank {comm.rank} is not in"):
            hvd.allreduce(torch.ones(2), process_set=pair)
        with pytest.raises(UsageError, match="is not in"):
            hvd.broadcast_parameters({"w": torch.ones(2)}, 0, process_set=pair)
    else:
        place = RANKS.index(comm.rank)
        parts = [of(rank) for rank in RANKS]
        own, summed = of(comm.rank), parts[0] + parts[1]
        x = own.clone().requires_grad_()
        out = hvd.allreduce(x, op=hvd.Sum, process_set=pair)
        check(out.detach(), summed)
        out.sum().backward()
        check(x.grad, torch.full((6, 3), 2.0))
        check(hvd.allreduce(own, process_set=pair), summed / 2)
        check(hvd.allgather(own[: place + 1], process_set=pair), torch.cat([parts[0][:1], parts[1][:2]]))
        check(hvd.broadcast(own, root_rank=2, process_set=pair), parts[1])  # the root is a rank of the world
        check(hvd.reducescatter(own, op=hvd.Sum, process_set=pair), summed[share(6, 2, place)])
        check(
            hvd.alltoall(own, [1, 2], process_set=pair)[0], torch.cat([p[:1] if not place else p[1:3] for p in parts])
        )
        assert hvd.broadcast_object(comm.rank, 2, process_set=pair) == 2
        assert hvd.allgather_object(comm.rank, process_set=pair) == RANKS
        hvd.barrier(process_set=pair)
        own = of(comm.rank)
        hvd.broadcast_parameters({"w": own}, 2, process_set=pair)
        check(own, parts[1])
        with pytest.raises(UsageError, match="expected one of the ranks"):
            hvd.broadcast(own, root_rank=1, process_set=pair)
        y = of(comm.rank).requires_grad_()
        hvd.allgather(y, process_set=pair).backward(torch.ones(12, 3) * (1 + place))
        check(y.grad, torch.full((6, 3), 1.5))
    check(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(comm.size)]))


@pytest.mark.ranks(min=3)
def test_optimizer(comm: Any, pair: hvd.ProcessSet) -> None:
    """Regression: ranks of the set train together repeatedly; the others step alone, where they were refused."""

    class Copies:
        def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
            return tensor, None

        def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
            return tensor

    everything: list[dict[str, Any]] = [{}, {"compression": Copies()}, {"op": hvd.Adasum}, {"compression": "int8"}]
    for options in everything:
        network, alone = model(), model()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters(), process_set=pair, **options)
        for step in range(3):
            inputs, targets = batch(comm, step)
            rows = [slice(4 * rank, 4 * rank + 4) for rank in (RANKS if comm.rank in RANKS else [comm.rank])]
            optimizer.zero_grad()
            own = slice(4 * comm.rank, 4 * comm.rank + 4)
            loss_of(network, (inputs[own], targets[own])).backward()
            optimizer.step()
            plain.zero_grad()
            torch.stack([loss_of(alone, (inputs[row], targets[row])) for row in rows]).mean().backward()
            plain.step()
        assert optimizer.param_groups
        if comm.rank not in RANKS or (options.keys() <= {"compression"} and options.get("compression") != "int8"):
            assert_close(parameters_of(network), parameters_of(alone))


@pytest.mark.ranks(min=2)
def test_a_rank_outside_the_set_can_run_the_same_script(comm: Any) -> None:
    """Closures, clipping, accumulation and saving work in one script for all ranks."""
    first = hvd.add_process_set([0])
    network, alone = model(), model()
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(network.parameters(), lr=0.1),
        network.named_parameters(),
        process_set=first,
        backward_passes_per_step=2,
    )
    data = mine(comm, batch(comm))
    for its, mod in ((optimizer, network), (plain, alone)):
        for _ in range(2):
            its.zero_grad()
            for _ in range(2):
                loss_of(mod, data).backward()
            if its is optimizer:
                its.synchronize()
                norm = its.clip_grad_norm(0.5)
                with its.skip_synchronize():
                    its.step()
            else:
                expected = nn.utils.clip_grad_norm_(mod.parameters(), 0.5)
                its.step()
    assert_close(parameters_of(network), parameters_of(alone))
    torch.testing.assert_close(norm.double(), expected.double())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.report.sent_bytes == 0
    optimizer.close()
    assert hvd.remove_process_set(first)


def test_an_unregistered_set_is_refused(comm: Any) -> None:
    everything: list[dict[str, Any]] = [{}, {"op": hvd.Adasum}]
    for options in everything:
        optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
        with pytest.raises(UsageError, match="is not registered"):
            hvd.DistributedOptimizer(optimizer, process_set=hvd.ProcessSet([0]), **options)
        assert type(optimizer) is torch.optim.SGD


@pytest.mark.ranks(min=3)
def test_sync_batch_norm(comm: Any, pair: hvd.ProcessSet) -> None:
    if comm.rank not in RANKS:
        return
    layer, plain = hvd.SyncBatchNorm(3, process_set=pair), nn.BatchNorm1d(3)
    parts = [of(rank) + torch.eye(6, 3) * rank for rank in RANKS]
    place = RANKS.index(comm.rank)
    torch.testing.assert_close(layer(parts[place]), plain(torch.cat(parts))[6 * place : 6 * place + 6])


@pytest.mark.ranks(min=3)
def test_names_of_different_sets_are_different_names(comm: Any, pair: hvd.ProcessSet) -> None:
    """A name may be pending in the set and among all ranks at the same time."""
    handle = None
    if comm.rank in RANKS:
        handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum, process_set=pair)
    everyone = hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum)
    check(everyone, torch.full((3,), float(comm.size)))
    if handle is not None:
        check(hvd.synchronize(handle), torch.full((2,), 2.0))


@pytest.mark.ranks(min=2)
def test_the_global_set_given_explicitly(comm: Any) -> None:
    everyone = hvd.global_process_set
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=everyone), torch.full((2,), comm.size * 1.0))
    network = model()
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, process_set=everyone)
    loss_of(network, mine(comm, batch(comm))).backward()
    optimizer.step()
    assert_same_everywhere(comm, parameters_of(network))
