"""Errors of ranks that disagree: all get the error, and the next operation works."""

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import commlib_torch as hvd
import commlib_torch.horovod
from commlib.errors import MismatchError, UsageError

from .oracle import model
from .values import check

Call = Callable[[], Any]
ONES = torch.ones(4, 2)

# The call of all ranks but the last, the call of the last one, and the error message.
MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "shape": (
        lambda: hvd.allreduce(ONES, name="bad"),
        lambda: hvd.allreduce(torch.ones(4, 3), name="bad"),
        r"shape is \(4, 2\) on ranks? .*\(4, 3\) on rank",
    ),
    "dtype": (
        lambda: hvd.allreduce(ONES, name="bad"),
        lambda: hvd.allreduce(ONES.bfloat16(), name="bad"),
        "dtype is float32 on .* bfloat16 on rank",
    ),
    "op": (
        lambda: hvd.allreduce(ONES, name="bad", op=hvd.Sum),
        lambda: hvd.allreduce(ONES, name="bad", op=hvd.Min),
        "op is sum on .* min on rank",
    ),
    "scale": (
        lambda: hvd.allreduce(ONES, name="bad"),
        lambda: hvd.allreduce(ONES, name="bad", prescale_factor=0.5),
        "prescale_factor is 1.0 on .* 0.5 on rank",
    ),
    "root": (
        lambda: hvd.broadcast(ONES, 0, name="bad"),
        lambda: hvd.broadcast(ONES, hvd.size() - 1, name="bad"),
        "root is 0 on .* on rank",
    ),
    "verb": (
        lambda: hvd.allgather(ONES, name="bad"),
        lambda: hvd.alltoall(ONES, [0] * hvd.size(), name="bad"),
        "verb is allgather on .* alltoall on rank",
    ),
    "rows": (
        lambda: hvd.allgather(ONES, name="bad"),
        lambda: hvd.allgather(torch.ones(4, 3), name="bad"),
        r"shape is \(any, 2\) on .*\(any, 3\) on rank",
    ),
    "part of a group": (
        lambda: hvd.grouped_allreduce([ONES, ONES], name="bad"),
        lambda: hvd.grouped_allreduce([ONES, torch.ones(1)], name="bad"),
        "shape is .* on rank",
    ),
    "number": (
        lambda: hvd.grouped_allgather([ONES, ONES], name="bad"),
        lambda: hvd.grouped_allgather([ONES], name="bad"),
        "number of tensors is 2 on .* 1 on rank",
    ),
    "reducescatter": (
        lambda: hvd.reducescatter(ONES, "bad", op=hvd.Sum),
        lambda: hvd.reducescatter(ONES, "bad", op=hvd.Average),
        "op is sum on .* mean on rank",
    ),
    "sparse": (
        lambda: hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "bad")(),
        lambda: hvd.sparse_allreduce_async(torch.eye(3, 4).to_sparse(), "bad")(),
        r"shapes of the ranks are \[\[3, 3\], .*\[3, 4\]\]",
    ),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_disagree(comm: Any, kind: str) -> None:
    usual, odd, message = MISMATCHES[kind]
    for _ in range(2):  # also when the name is already known
        with pytest.raises(MismatchError, match=message) as caught:
            (odd if comm.rank == comm.size - 1 else usual)()
        assert isinstance(caught.value, hvd.HorovodInternalError) and isinstance(caught.value, RuntimeError)
        assert "bad" in str(caught.value)
        check(hvd.allreduce(torch.ones(3), name="good", op=hvd.Sum), torch.full((3,), float(comm.size)))
        check(hvd.allreduce(ONES, name="bad", op=hvd.Sum), ONES * comm.size)  # the name is free again


@pytest.mark.ranks(min=2)
def test_a_mismatch_disturbs_no_other_operation(comm: Any) -> None:
    """All are submitted before any wait, in a different order on every rank."""
    order = [*range(6)]
    random.Random(comm.rank).shuffle(order)
    handles = {}
    for n in order:
        rows = 3 if n == 2 and comm.rank == 0 else 4
        handles[n] = hvd.allreduce_async(torch.full((rows,), float(n)), name=f"among others {n}", op=hvd.Sum)
    for n in range(6):
        if n == 2:
            with pytest.raises(MismatchError, match=r"\(3,\) on rank 0"):
                hvd.synchronize(handles[n])
        else:
            check(hvd.synchronize(handles[n]), torch.full((4,), float(n * comm.size)))


def test_a_pending_name_is_refused(comm: Any) -> None:
    """The second submission is refused at once, and the pending operation is not disturbed."""
    comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        comm.barrier()
    else:
        comm.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    check(hvd.synchronize(handle), torch.full((2,), float(comm.size)))
    check(hvd.allreduce(torch.ones(2), name="twice", op=hvd.Sum), torch.full((2,), float(comm.size)))


def test_invalid_arguments_are_refused_locally(comm: Any) -> None:
    with pytest.raises(UsageError, match="op or average, not both"):
        hvd.allreduce(ONES, average=True, op=hvd.Sum)
    with pytest.raises(UsageError, match="op is 17"):
        hvd.allreduce(ONES, op=17)
    with pytest.raises(UsageError, match="expected Average or Sum"):
        hvd.reducescatter(ONES, op=hvd.Max)
    with pytest.raises(UsageError, match="device meta has no values"):
        hvd.allreduce(torch.empty(2, device="meta"))
    with pytest.raises(UsageError, match="to_dense"):
        hvd.allreduce(torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match="expected a torch tensor, got ndarray"):
        hvd.allreduce(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a torch tensor, got str"):
        hvd.broadcast("abc", 0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"compression must be .* got 'fp16': pass Compression.fp16"):
        hvd.allreduce(torch.ones(2), compression="fp16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="float8"):
        hvd.broadcast(torch.zeros(2).to(torch.float8_e5m2), 0)
    with pytest.raises(UsageError, match="splits must be"):
        hvd.alltoall(ONES, [1.5] * comm.size)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="splits must be"):
        hvd.alltoall(ONES, [1] * (comm.size + 1))
    with pytest.raises(UsageError, match="a sum of at most 4 rows"):
        hvd.alltoall(ONES, [5] * comm.size)
    with pytest.raises(UsageError, match="root_rank is 99"):
        hvd.broadcast(ONES, 99)
    with pytest.raises(UsageError, match="no tensors"):
        hvd.grouped_allreduce([])
    with pytest.raises(UsageError, match="expected a handle"):
        hvd.synchronize(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a handle"):
        hvd.poll(None)  # type: ignore[arg-type]
    if comm.size == 3:
        with pytest.raises(UsageError, match="not divisible by 3 ranks"):
            hvd.alltoall(ONES)
    assert hvd.allgather_object(comm.rank) == list(range(comm.size))  # communication still works


def test_thousands_of_tensors_in_any_order(comm: Any) -> None:
    """2000 small tensors, submitted twice in random orders that differ between ranks; later the names are known."""
    count = 2000
    for round_ in range(2):
        order = list(range(count))
        random.Random(f"{round_} {comm.rank}").shuffle(order)
        handles: list[Any] = [None] * count
        for n in order:
            handles[n] = hvd.allreduce_async_(torch.full((n % 7 + 1,), float(n + comm.rank)), name=f"w{n}", op=hvd.Sum)
        total = sum(range(comm.size))
        for n in random.Random(comm.rank + 7).sample(order, count):
            check(hvd.synchronize(handles[n]), torch.full((n % 7 + 1,), float(n * comm.size + total)))


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DataParallel": (hvd.DataParallel, "DataParallel: expected an nn.Module"),
    "convert_sync_batchnorm": (hvd.convert_sync_batchnorm, "convert_sync_batchnorm: expected an nn.Module"),
    "expertize": (
        lambda other: hvd.expertize(other, commlib_torch.horovod.init(), {"mlp": hvd.Experts(4)}),
        "expertize: expected an nn.Module",
    ),
    "parallelize": (
        lambda other: hvd.parallelize(other, commlib_torch.horovod.init(), {"mlp": hvd.Column()}),
        "parallelize: expected an nn.Module",
    ),
    "a plan": (
        lambda other: hvd.parallelize(nn.Linear(2, 2), commlib_torch.horovod.init(), other),
        "plan: expected a mapping of layers' names to Column",
    ),
    "broadcast_parameters": (
        hvd.broadcast_parameters,
        r"broadcast_parameters: expected a mapping or an iterable of tensors, such as model.state_dict\(\)",
    ),
    "broadcast_optimizer_state": (
        hvd.broadcast_optimizer_state,
        "broadcast_optimizer_state: expected a torch optimizer",
    ),
    "clip_grad_norm_": (
        lambda other: hvd.clip_grad_norm_(other, 1.0),
        r"clip_grad_norm_: expected parameters, such as model.parameters\(\)",
    ),
    "named_parameters": (
        lambda other: hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.1), other),
        "DistributedOptimizer: expected named_parameters= such as",
    ),
    "grouped_allreduce": (hvd.grouped_allreduce, "grouped_allreduce: expected a list of tensors"),
    "grouped_allreduce_": (hvd.grouped_allreduce_, "grouped_allreduce: expected a list of tensors"),
    "grouped_allreduce_async": (hvd.grouped_allreduce_async, "grouped_allreduce: expected a list of tensors"),
    "grouped_allgather": (hvd.grouped_allgather, "grouped_allgather: expected a list of tensors"),
    "grouped_reducescatter": (hvd.grouped_reducescatter, "grouped_reducescatter: expected a list of tensors"),
    "grouped_reducescatter_async": (
        hvd.grouped_reducescatter_async,
        "grouped_reducescatter: expected a list of tensors",
    ),
}


@pytest.mark.parametrize("call", OTHERS)
def test_arguments_of_other_types_are_refused(comm: Any, call: str) -> None:
    """Regression: some raised a TypeError or an AttributeError from within."""
    run, text = OTHERS[call]
    for other, got in ((3, "int 3"), (object(), "object")):
        with pytest.raises(UsageError, match=f"{text}.*, got {got}"):
            run(other)


@pytest.mark.parametrize("wrong", ["x", 3, [0, "x"], [0.5], object()])
def test_init_refuses_other_ranks(comm: Any, wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"init: comm is .*: expected a list of ranks or an mpi4py communicator"):
        commlib_torch.horovod.init(comm=wrong)
    with pytest.raises(UsageError, match="init: commlib is already initialised with other ranks"):
        commlib_torch.horovod.init(comm=[comm.size])
    assert commlib_torch.horovod.init(comm=np.arange(comm.size)) is comm


def test_init_refuses_other_process_sets(comm: Any) -> None:
    for wrong, text in ((3, 'expected process_sets="dynamic", or a list of ProcessSet'), ([3], "a ProcessSet")):
        with pytest.raises(UsageError, match=f"init: .*{text}, got int 3"):
            commlib_torch.horovod.init(process_sets=cast("Any", wrong))
