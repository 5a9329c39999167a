"""Elastic state that is committed and restored, and samplers that record processed samples."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import commlib_torch as hvd
from commlib.errors import MismatchError, UsageError
from commlib_torch.elastic import ElasticSampler, HostsUpdatedInterrupt, TorchState, run, run_fn

from .oracle import assert_close, assert_same_everywhere, batch, loss_of, mine, model, parameters_of


def make(comm: Any, seed: int = 0) -> tuple[nn.Module, Any, Any]:
    network = model(seed)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.Adam(network.parameters(), lr=0.05 * (seed + 1)))
    return network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(comm: Any, network: nn.Module, optimizer: Any, scheduler: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(network, mine(comm, batch(comm, step))).backward()
    optimizer.step()
    scheduler.step()


def test_restore_goes_back_to_the_commit(comm: Any) -> None:
    network, optimizer, scheduler = make(comm)
    state: Any = TorchState(model=network, optimizer=optimizer, scheduler=scheduler, epoch=0, seen=[1])
    assert state.model is network and state.optimizer is optimizer and state.epoch == 0
    for step in range(3):
        train(comm, network, optimizer, scheduler, step)
    state.epoch = 3
    state.seen.append(2)
    state.commit()
    committed = parameters_of(network)
    ends = []
    for _ in range(3):  # again: training after a restore must not change the restored state
        for step in range(3, 6):
            train(comm, network, optimizer, scheduler, step)
        ends.append(parameters_of(network))
        state.epoch, state.seen[:] = 6, [9]
        state.restore()
        assert (state.epoch, state.seen) == (3, [1, 2])
        assert_close(parameters_of(network), committed, 0)
        assert optimizer.param_groups[0]["lr"] == 0.025 and scheduler.last_epoch == 3
    assert_close(ends[0], ends[1], 0)
    assert_close(ends[0], ends[2], 0)


def test_sync_copies_everything_from_rank_0(comm: Any) -> None:
    network, optimizer, scheduler = make(comm, seed=comm.rank)
    state: Any = TorchState(network, optimizer, scheduler=scheduler, epoch=comm.rank + 5)
    state.sync()
    assert state.epoch == 5
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert_close(parameters_of(network), parameters_of(model()), 0)
    train(comm, network, optimizer, scheduler, 0)
    assert_same_everywhere(comm, parameters_of(network))
    state.restore()  # synchronised state counts as committed
    assert_close(parameters_of(network), parameters_of(model()), 0)


def test_another_model_under_the_name(comm: Any) -> None:
    state: Any = TorchState(model=model())
    other = model(seed=3)
    state.model = other
    with torch.no_grad():
        next(other.parameters()).zero_()
    state.restore()
    assert_close(parameters_of(other), parameters_of(model(seed=3)), 0)
    with pytest.raises(TypeError, match="model is a int"):
        state.model = 3
    assert state.optimizer is None


@pytest.mark.ranks(min=2)
def test_run_restores_after_a_failed_operation(comm: Any) -> None:
    network, optimizer, scheduler = make(comm, seed=comm.rank)
    state: Any = TorchState(model=network, optimizer=optimizer, scheduler=scheduler, step=0)
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append("reset")])

    @run
    def training(state: Any) -> str:
        calls.append("called")
        while state.step < 5:
            train(comm, network, optimizer, scheduler, state.step)
            state.step += 1
            if state.step == 3 and calls.count("called") == 1:
                hvd.allreduce(torch.ones(2 + comm.rank), name="fails")
            if state.step % 2 == 0:
                state.commit()
        return "done"

    assert training(state) == "done"
    assert calls == ["called", "reset", "called"]
    alone = model()
    plain: Any = torch.optim.Adam(alone.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(5):
        plain.zero_grad()
        loss_of(alone, batch(comm, step)).backward()
        plain.step()
        schedule.step()
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)
    with pytest.raises(MismatchError):  # a function that always fails ends it
        run(lambda state: hvd.allreduce(torch.ones(2 + comm.rank), name="always fails"))(state)
    optimizer.close()  # errors may keep it alive, and a join in another test would wait for it


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "who", ["all", "one", "one, by name", "one, others gather", "one, half-way", "one of two optimizers", "hosts"]
)
def test_an_error_that_the_program_raises_restores_the_commit(comm: Any, who: str) -> None:
    """Regression: HorovodInternalError within `run` ended the job. Other ranks detect it where they wait.

    By name they waited until COMMLIB_TIMEOUT or for ever. With two optimizers on one communicator, while the
    others waited for their turn, restoring was a collective that the raising rank did not join.
    """
    network, optimizer, scheduler = make(comm, seed=comm.rank)
    other = make(comm)[1] if who == "one of two optimizers" else None
    state: Any = TorchState(model=network, optimizer=optimizer, scheduler=scheduler, step=0)
    calls: list[int] = []

    def half_way(loss: torch.Tensor) -> None:
        first = next(network.parameters())
        hook = first.register_hook(_raise("by hand") if comm.rank == comm.size - 1 else lambda gradient: None)
        try:
            loss.backward()
        finally:
            hook.remove()

    @run
    def training(state: Any) -> str:
        calls.append(state.step)
        while state.step < 5:
            optimizer.zero_grad()
            loss_of(network, mine(comm, batch(comm, state.step))).backward()
            if state.step == 3 and len(calls) == 1:
                if who == "one, half-way":
                    half_way(loss_of(network, mine(comm, batch(comm, state.step))))
                elif who == "all" or comm.rank == comm.size - 1:
                    raise HostsUpdatedInterrupt if who == "hosts" else hvd.HorovodInternalError("by hand")
                if who == "one of two optimizers":
                    loss_of(network, mine(comm, batch(comm, state.step))).backward()
                elif who in ("one", "hosts"):
                    comm.barrier()
                elif who == "one, others gather":  # the agreement was taken for the gather: ranks received its messages
                    got = comm.all_gather_object(comm.rank)
                    raise AssertionError(f"gathered {got}")
                else:
                    hvd.allreduce(torch.ones(2), name="metric")
            optimizer.step()
            scheduler.step()
            state.step += 1
            if state.step == 2:
                state.commit()
        return "done"

    assert training(state) == "done"
    assert calls == [0, 2]
    alone = model()
    plain: Any = torch.optim.Adam(alone.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(5):
        plain.zero_grad()
        loss_of(alone, batch(comm, step)).backward()
        plain.step()
        schedule.step()
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)
    with pytest.raises(hvd.HorovodInternalError, match="again and again"):
        run_fn(_raise("again and again"), lambda: None)(state)
    with pytest.raises(UsageError):  # an error in the program: another attempt would not help
        run(lambda state: hvd.allreduce(torch.ones(2), op="no such"))(state)
    optimizer.close()
    if other is not None:
        other.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("first", [True, False])
def test_all_ranks_give_up_after_the_same_attempts(comm: Any, first: bool) -> None:
    """Regression: each rank counted alone, including its agreement with others: one stopped, and the others waited."""
    raising = 0 if first else comm.size - 1
    calls: list[int] = []

    @run
    def training(state: Any) -> None:
        calls.append(1)
        if comm.rank == raising:
            raise hvd.HorovodInternalError("again and again")
        hvd.allreduce(torch.ones(2), name="never") if len(calls) == 2 else comm.barrier()

    with pytest.raises(hvd.HorovodInternalError, match="again and again" if comm.rank == raising else "rank"):
        training(TorchState())
    assert len(calls) == 3
    assert hvd.allgather_object(comm.rank) == list(range(comm.size))


def _raise(text: str) -> Any:
    def raising(state: Any) -> None:
        raise hvd.HorovodInternalError(text)

    return raising


@pytest.mark.parametrize("skip_sync", [False, True])
def test_a_change_of_hosts_keeps_the_state(comm: Any, skip_sync: bool) -> None:
    """As in Horovod, nothing is restored, the callback of `run_fn` runs, and the state comes from rank 0."""
    state: Any = TorchState(mine=comm.rank)
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append("callback")])

    def training(state: Any) -> int:
        calls.append("called")
        assert state.mine == (0 if len(calls) == 1 else 5 if not skip_sync else 5 + comm.rank)
        if len(calls) == 1:
            state.mine = 5 + comm.rank
            raise HostsUpdatedInterrupt(skip_sync)
        result: int = state.mine
        return result

    result = run_fn(training, lambda: calls.append("reset"))(state)
    assert result == (5 + comm.rank if skip_sync else 5)
    assert calls == ["called", "reset", "callback", "called"]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("length", [12, 13, 1, 0])
def test_sampler_shares_everything(comm: Any, length: int, shuffle: bool) -> None:
    sampler = ElasticSampler(range(length), shuffle=shuffle, seed=4)
    shares = hvd.allgather_object(list(sampler))
    assert {len(share) for share in shares} == {len(sampler)} == {-(-length // comm.size)}
    assert {index for share in shares for index in share} == set(range(length))
    assert list(sampler) == shares[comm.rank]  # once more: the result is the same
    if not shuffle:
        assert shares[0] == list(range(0, length, comm.size))
    elif length == 12:
        first = list(sampler)
        sampler.set_epoch(1)
        assert list(sampler) != first


def test_a_sampler_continues_with_unprocessed_samples(comm: Any) -> None:
    """Every rank processes a different number of batches; after a restore, all share the unprocessed samples."""
    sampler = ElasticSampler(range(40), seed=1)
    state: Any = TorchState(sampler=sampler, batch=0)
    taken = list(sampler)
    done = set()
    for number in range(1 + comm.rank % 2):
        done |= set(taken[2 * number : 2 * number + 2])
        sampler.record_batch(number, 2)
    state.commit()
    sampler.record_indices(taken[-1:])  # not committed
    everything = set().union(*hvd.allgather_object(done))
    state.restore()
    state.on_reset()
    rest = {index for share in hvd.allgather_object(list(sampler)) for index in share}
    assert rest == set(range(40)) - everything
    saved = sampler.state_dict()
    sampler.set_epoch(1)
    assert len(sampler) == -(-40 // comm.size)
    sampler.load_state_dict(saved)
    assert {index for share in hvd.allgather_object(list(sampler)) for index in share} == rest
    if comm.rank != 0:
        sampler.set_epoch(7)
    state.sync()
    assert sampler.epoch == 0
    assert {index for share in hvd.allgather_object(list(sampler)) for index in share} == rest


@pytest.mark.parametrize("start", [0, 3])
def test_a_sampler_records_batches_after_a_restart_under_any_numbering(comm: Any, start: int) -> None:
    """Regression: a loop that continued counting from the committed batch recorded the wrong batches, or none."""
    sampler = ElasticSampler(range(12 * comm.size), seed=1)
    state: Any = TorchState(sampler=sampler, batch=0)
    processed: set[int] = set()
    for number in range(3):
        processed.update(list(sampler)[2 * number : 2 * number + 2])
        sampler.record_batch(number, 2)
    assert sampler.processed_num == 6 * comm.size
    state.commit()
    assert sampler.processed_num == 6 * comm.size == len(sampler.processed_indices)
    sampler.record_batch(3, 2)
    state.restore()
    assert sampler.processed_num == 6 * comm.size and len(sampler) == 6
    for number, index in enumerate(list(sampler)[:4:2]):
        processed.update(list(sampler)[2 * number : 2 * number + 2])
        assert index in processed
        sampler.record_batch(start + number, 2)
    assert sampler.processed_num == 10 * comm.size
    state.commit()
    assert sampler.processed_indices == set().union(*hvd.allgather_object(processed))
    assert sampler.state_dict()["processed_num"] == 10 * comm.size
    sampler.set_epoch(1)
    assert sampler.processed_num == 0


def test_sampler_in_a_loader(comm: Any) -> None:
    data = torch.arange(20)
    sampler = ElasticSampler(data)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)  # type: ignore[arg-type]
    seen = torch.cat(list(loader))
    everyones = hvd.allgather(seen)
    assert set(everyones.tolist()) == set(range(20))
    for number, _ in enumerate(loader):
        sampler.record_batch(number, 3)
    assert sampler.processed_indices == set(seen.tolist())


def test_a_commit_between_accumulating_passes_is_warned_of(comm: Any) -> None:
    network = model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), backward_passes_per_step=2)
    state: Any = TorchState(network, optimizer)
    for passes in (1, 2):
        loss_of(network, mine(comm, batch(comm, 0))).backward()
        with pytest.warns(UserWarning, match="between the passes") if passes == 1 else warnings.catch_warnings():
            warnings.simplefilter("error" if passes == 2 else "always")
            state.commit()
    optimizer.step()
    optimizer.close()


@pytest.mark.ranks(min=2)
def test_a_commit_after_no_sync_is_warned_of(comm: Any) -> None:
    """Regression: only optimizers were checked, not `DataParallel`, and the warning named a line of this library."""
    network = model()
    wrapped = hvd.DataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    state: Any = TorchState(network, optimizer)
    data = mine(comm, batch(comm, 0))
    with wrapped.no_sync():
        loss_of(wrapped, data).backward()
    with pytest.warns(UserWarning, match="between the passes") as caught:
        state.commit()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.zero_grad()  # no gradients remain
        state.commit()
        loss_of(wrapped, data).backward()
        state.commit()


@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, hvd.GradScaler])
@pytest.mark.parametrize("where", ["in the step", "after unscale_", "after the step", "hosts"])
def test_a_scaler_restarts_after_a_failed_step(comm: Any, make_scaler: Any, where: str) -> None:
    """Regression: it took the next gradients for unscaled, so that the step was too large, or refused them."""
    network, alone = model(), model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.05))
    scaler = make_scaler("cpu", init_scale=64.0)
    state: Any = TorchState(network, optimizer, scaler=scaler, step=0)
    raised: list[str] = []

    def reach(place: str) -> None:
        at = "after unscale_" if where == "hosts" else where
        if place == at and state.step == 1 and not raised:
            raised.append(place)
            raise HostsUpdatedInterrupt if where == "hosts" else hvd.HorovodInternalError("by hand")

    optimizer.register_step_pre_hook(lambda *_: reach("in the step"))

    @run
    def training(state: Any) -> None:
        while state.step < 3:
            optimizer.zero_grad()
            scaler.scale(loss_of(network, mine(comm, batch(comm, state.step)))).backward()
            if where in ("after unscale_", "hosts"):
                scaler.unscale_(optimizer)
                reach("after unscale_")
            scaler.step(optimizer)
            reach("after the step")
            scaler.update()
            state.step += 1
            state.commit()

    training(state)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(3):
        plain.zero_grad()
        loss_of(alone, batch(comm, step)).backward()
        plain.step()
    assert raised
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)
    optimizer.close()


@pytest.mark.ranks(min=2)
def test_passes_outside_the_state_count_from_0_after_a_restart(comm: Any) -> None:
    """Regression: a rank with one pass continued counting, reduced before the others did, and ranks diverged."""
    network, alone = model(), model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), backward_passes_per_step=2)
    state: Any = TorchState(network, step=0)
    calls: list[int] = []

    @run
    def training(state: Any) -> None:
        calls.append(state.step)
        while state.step < 3:
            network.zero_grad()  # the optimizer does not notice
            for number in range(2):
                loss_of(network, mine(comm, batch(comm, 2 * state.step + number))).backward()
                if (state.step, number, len(calls), comm.rank) == (1, 0, 1, comm.size - 1):
                    raise hvd.HorovodInternalError("by hand")
            optimizer.step()
            state.step += 1
            state.commit()

    training(state)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(3):
        plain.zero_grad()
        for number in range(2):
            loss_of(alone, batch(comm, 2 * step + number)).backward()
        plain.step()
    assert calls == [0, 1]
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)
    optimizer.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("raising", [0, 1])
def test_samples_where_hosts_change_on_one_rank_alone(comm: Any, raising: int) -> None:
    """Regression: the others returned to their commit, and that rank did not: its recorded samples were lost."""
    weight = nn.Linear(1, 24, bias=False).double()
    nn.init.zeros_(weight.weight)
    sampler = ElasticSampler(range(24), shuffle=False)
    state: Any = TorchState(model=weight, sampler=sampler, batch=0)
    raised: list[int] = []

    @run
    def training(state: Any) -> None:
        for index in list(state.sampler):
            if comm.rank == raising and state.batch == 1 and not raised:
                raised.append(1)
                raise HostsUpdatedInterrupt
            seen = torch.zeros(24, 1, dtype=torch.float64)
            seen[index] = 1
            seen = hvd.allreduce(seen, name="seen", op=hvd.Sum)
            with torch.no_grad():
                weight.weight += seen
            state.batch += 1
            state.sampler.record_batch(0, 1)
            if state.batch % 2 == 0:
                state.commit()

    training(state)
    assert weight.weight.ravel().tolist() == [1.0] * 24


@pytest.mark.ranks(min=2)
def test_a_commit_that_one_rank_misses_stores_nothing(comm: Any) -> None:
    """Regression: others had stored the model when the sampler failed: the states did not match."""
    weight = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(weight.weight)
    sampler = ElasticSampler(list(range(6 * comm.size)), shuffle=False)
    state: Any = TorchState(model=weight, sampler=sampler, batch=0)
    raised: list[int] = []

    @run
    def training(state: Any) -> None:
        for _ in list(state.sampler):
            total = hvd.allreduce(torch.ones(1, 1, dtype=torch.float64), name="half a commit", op=hvd.Sum)
            with torch.no_grad():
                weight.weight += total
            state.batch += 1
            state.sampler.record_batch(0, 1)
            if comm.rank == comm.size - 1 and state.batch == 3 and not raised:
                raised.append(1)
                raise hvd.HorovodInternalError("by hand")
            state.commit()

    training(state)
    assert (weight.weight.item(), state.batch) == (6.0 * comm.size, 6)
