"""Operations by name, with Horovod's arguments: every verb, form and dtype, compared with local computation."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import commlib
import commlib_torch as hvd
from commlib.errors import UsageError

from .values import ALL, COMPLEX, FLOATS, FORMS, INTEGERS, check, everyone, of, share

names = (f"test {number}" for number in itertools.count())


def total(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dtype == torch.bool:
        return torch.stack(tensors).any(0)
    return torch.stack(tensors).sum(0).to(tensors[0].dtype)


def mean(comm: Any, tensors: list[Tensor]) -> Tensor:
    """Whole numbers are rounded towards zero."""
    dtype = tensors[0].dtype
    if dtype in INTEGERS:
        return torch.div(total([tensor.long() for tensor in tensors]), comm.size, rounding_mode="trunc").to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.div(total([tensor.to(wide) for tensor in tensors]), comm.size).to(dtype)


def test_rank_and_size(comm: Any) -> None:
    assert hvd.init() is commlib.world()
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    assert (hvd.local_rank(), hvd.local_size()) == (comm.node().rank, comm.node().size)
    assert hvd.cross_size() * hvd.local_size() == hvd.size() or not hvd.is_homogeneous()
    assert 0 <= hvd.cross_rank() < hvd.cross_size()
    assert hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported()
    assert not (hvd.gloo_built() or hvd.gloo_enabled() or hvd.nccl_built() or hvd.ddl_built() or hvd.ccl_built())
    assert not (hvd.cuda_built() or hvd.rocm_built())
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == list(range(6))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_allreduce_of_every_dtype(comm: Any, dtype: torch.dtype) -> None:
    parts = everyone(comm, dtype)
    mine = parts[comm.rank].clone()
    check(hvd.allreduce(mine, op=hvd.Sum), total(parts))
    check(hvd.synchronize(hvd.allreduce_async(mine, average=False)), total(parts))
    check(mine, parts[comm.rank])  # untouched
    if dtype != torch.bool:
        check(hvd.allreduce(mine), mean(comm, parts))
        check(hvd.allreduce(mine, True), mean(comm, parts))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    check(mine, total(parts))
    mine = parts[comm.rank].clone()
    handle = hvd.allreduce_async_(mine, name=next(names), op=hvd.Sum)
    assert hvd.synchronize(handle) is mine
    assert hvd.poll(handle)
    check(mine, total(parts))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_other_operations(comm: Any, dtype: torch.dtype) -> None:
    parts = everyone(comm, dtype)
    stacked = torch.stack(parts).double()
    for op, expected in (
        (hvd.Min, stacked.amin(0)), (hvd.Max, stacked.amax(0)), (hvd.Product, stacked.prod(0)),
    ):  # fmt: skip
        check(hvd.allreduce(parts[comm.rank], op=op), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tensor(comm: Any, form: str, dtype: torch.dtype) -> None:
    parts = everyone(comm, dtype, form)
    mine, last = parts[comm.rank], comm.size - 1
    check(hvd.allreduce(mine, op=hvd.Sum), total(parts))
    check(hvd.allgather(mine), torch.cat(parts))
    check(hvd.broadcast(mine, last), parts[last])
    check(hvd.reducescatter(mine, op=hvd.Sum), total(parts)[share(len(mine), comm.size, comm.rank)])
    splits = [len(mine) if peer == last else 0 for peer in range(comm.size)]
    expected = torch.cat(parts) if comm.rank == last else mine[:0]
    check(hvd.alltoall(mine, splits)[0], expected)
    for verb, result in ((hvd.allreduce_, total(parts)), (hvd.broadcast_, parts[last])):
        target = mine.clone(memory_format=torch.preserve_format)
        target = FORMS[form](of(comm.rank, dtype))
        version = target._version
        done = verb(target, op=hvd.Sum) if verb is hvd.allreduce_ else verb(target, last)
        assert done is target
        check(target, result)
        assert target._version > version  # autograd detects the write


def test_tensors_without_dimensions(comm: Any) -> None:
    mine = torch.tensor(float(comm.rank), dtype=torch.bfloat16)
    expected = torch.tensor(sum(range(comm.size)), dtype=torch.bfloat16)
    check(hvd.allreduce(mine, op=hvd.Sum), expected)
    check(hvd.broadcast(mine, comm.size - 1), torch.tensor(comm.size - 1, dtype=torch.bfloat16))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    check(mine, expected)
    for verb in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(UsageError, match="0-dimensional"):
            verb(mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_scales(comm: Any, dtype: torch.dtype) -> None:
    parts = everyone(comm, dtype)
    half = [(0.5 * part.double()) for part in parts]
    if dtype == torch.int32:
        half = [part.trunc() for part in half]
    expected = 3 * torch.stack(half).sum(0)
    scales: Any = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    check(hvd.allreduce(parts[comm.rank], op=hvd.Sum, **scales), expected.to(dtype))
    rows = share(6, comm.size, comm.rank)
    check(hvd.reducescatter(parts[comm.rank], op=hvd.Sum, **scales), expected[rows].to(dtype))
    averaged = hvd.allreduce(parts[comm.rank], **scales)
    torch.testing.assert_close(averaged.double(), (expected / comm.size).to(dtype).double(), rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_movement_of_every_dtype(comm: Any, dtype: torch.dtype) -> None:
    parts = everyone(comm, dtype)
    mine, last = parts[comm.rank], comm.size - 1
    uneven = [part[: rank + 1] for rank, part in enumerate(parts)]
    check(hvd.allgather(uneven[comm.rank], name=next(names)), torch.cat(uneven))
    check(hvd.synchronize(hvd.allgather_async(mine)), torch.cat(parts))
    check(hvd.broadcast(mine, root_rank=last), parts[last])
    check(hvd.synchronize(hvd.broadcast_async(mine, last, next(names))), parts[last])
    check(mine, parts[comm.rank])
    target = mine.clone()
    assert hvd.synchronize(hvd.broadcast_async_(target, last)) is target
    check(target, parts[last])
    rows = torch.cat(parts)[: 2 * comm.size].roll(comm.rank, 0).contiguous()
    everyones = [torch.cat(parts)[: 2 * comm.size].roll(rank, 0) for rank in range(comm.size)]
    expected = torch.cat([theirs[2 * comm.rank : 2 * comm.rank + 2] for theirs in everyones])
    check(hvd.alltoall(rows), expected)
    check(hvd.synchronize(hvd.alltoall_async(rows, name=next(names))), expected)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_alltoall_with_splits(comm: Any, kind: Any) -> None:
    """Rank r sends (r + peer) % 3 rows to each peer, possibly none; the last row is not sent."""
    splits = [(comm.rank + peer) % 3 for peer in range(comm.size)]
    rows = [torch.full((n, 2), 10 * comm.rank + peer) for peer, n in enumerate(splits)]
    sent = torch.cat([*rows, torch.full((1, 2), -1)])
    counts = [(peer + comm.rank) % 3 for peer in range(comm.size)]
    expected = torch.cat([torch.full((n, 2), 10 * peer + comm.rank) for peer, n in enumerate(counts)])
    for out, received in (hvd.alltoall(sent, kind(splits)), hvd.synchronize(hvd.alltoall_async(sent, kind(splits)))):
        check(out, expected)
        assert received.tolist() == counts
        assert received.dtype == getattr(kind(splits), "dtype", torch.int64) or kind is np.array


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, *COMPLEX], ids=str)
def test_reducescatter(comm: Any, dtype: torch.dtype) -> None:
    parts = everyone(comm, dtype)
    rows = share(6, comm.size, comm.rank)
    check(hvd.reducescatter(parts[comm.rank], op=hvd.Sum), total(parts)[rows])
    check(hvd.reducescatter(parts[comm.rank], next(names)), mean(comm, parts)[rows])
    check(hvd.synchronize(hvd.reducescatter_async(parts[comm.rank], op=hvd.Sum)), total(parts)[rows])


def test_groups(comm: Any) -> None:
    """Several tensors, of several dtypes and shapes, as one operation."""
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.float32]
    forms = ["plain", "strided", "transposed", "empty"]
    parts = [everyone(comm, dtype, form) for dtype, form in zip(dtypes, forms, strict=True)]
    mine = [part[comm.rank] for part in parts]
    sums = [total(part) for part in parts]

    def check_all(got: Any, expected: list[Tensor]) -> None:
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check(one, other)

    check_all(hvd.grouped_allreduce(mine, op=hvd.Sum), sums)
    check_all(hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum, name=next(names))), sums)
    check_all(hvd.grouped_allreduce(mine), [mean(comm, part) for part in parts])
    for start in (hvd.grouped_allreduce_, lambda *a, **k: hvd.synchronize(hvd.grouped_allreduce_async_(*a, **k))):
        targets = [FORMS[form](of(comm.rank, dtype)) for dtype, form in zip(dtypes, forms, strict=True)]
        done = start(targets, op=hvd.Sum)
        assert all(one is other for one, other in zip(done, targets, strict=True))
        check_all(targets, sums)
    check_all(hvd.grouped_allgather(mine), [torch.cat(part) for part in parts])
    check_all(hvd.synchronize(hvd.grouped_allgather_async(mine)), [torch.cat(part) for part in parts])
    own = [one[share(len(one), comm.size, comm.rank)] for one in sums]
    check_all(hvd.grouped_reducescatter(mine, op=hvd.Sum), own)
    check_all(hvd.synchronize(hvd.grouped_reducescatter_async(mine, op=hvd.Sum, name=next(names))), own)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression_rounds_to_the_transmitted_dtype(comm: Any, compression: Any) -> None:
    exact = 1 + torch.arange(6.0).reshape(3, 2) * 2.0**-12
    wire = compression.wire or torch.float32
    expected = (torch.stack([(exact + rank).to(wire).double() for rank in range(comm.size)]).sum(0)).to(wire).float()
    check(hvd.allreduce(exact + comm.rank, op=hvd.Sum, compression=compression), expected)
    check(hvd.grouped_allreduce([exact + comm.rank], op=hvd.Sum, compression=compression)[0], expected)
    got = hvd.reducescatter(exact + comm.rank, op=hvd.Sum, compression=compression)
    check(got, expected[share(3, comm.size, comm.rank)])
    if compression is not hvd.Compression.none:
        assert not torch.equal(expected, torch.stack([exact + rank for rank in range(comm.size)]).sum(0))
    check(hvd.allreduce(torch.tensor([2**30 + 1]), op=hvd.Max, compression=compression), torch.tensor([2**30 + 1]))


def test_any_order_and_poll(comm: Any) -> None:
    """Every rank submits in a different order, and one of them late."""
    order = list(range(8))
    order = order[comm.rank :] + order[: comm.rank]
    if comm.rank == comm.size - 1:
        order.reverse()
    handles = {n: hvd.allreduce_async(torch.full((3,), n + comm.rank), name=f"order {n}", op=hvd.Sum) for n in order}
    for n in sorted(handles):
        check(hvd.synchronize(handles[n]), torch.full((3,), n * comm.size + sum(range(comm.size))))
        assert hvd.poll(handles[n])


def test_a_handle_is_not_done_before_all_ranks_have_submitted(comm: Any) -> None:
    if comm.rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="waits", op=hvd.Sum)
        polled = hvd.poll(handle)
        comm.barrier()
    else:
        comm.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="waits", op=hvd.Sum)
        polled = False
    assert not polled or comm.size == 1
    check(hvd.synchronize(handle), torch.full((2,), float(comm.size)))


def test_barrier_and_objects(comm: Any) -> None:
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)
    last = comm.size - 1
    assert hvd.broadcast_object({"rank": comm.rank}, last, name="object") == {"rank": last}
    assert hvd.broadcast_object(comm.rank) == 0
    assert hvd.allgather_object("x" * comm.rank) == ["x" * rank for rank in range(comm.size)]
    assert hvd.allgather_object(comm.rank, name="ranks") == list(range(comm.size))


def test_names_shared_with_ordered_verbs(comm: Any) -> None:
    """With ranks= these names are the ordered verbs on those ranks; root= is another name of root_rank=."""
    group = comm.split(comm.rank % 2, comm.rank)
    mine = torch.tensor([comm.rank])
    check(hvd.broadcast(mine, ranks=group), torch.tensor([comm.rank % 2]))
    check(hvd.broadcast_(mine.clone(), root=group.size - 1, ranks=group), torch.tensor([max(_peers(comm))]))
    check(hvd.broadcast_async(mine, 0, ranks=group).wait(), torch.tensor([comm.rank % 2]))
    check(hvd.broadcast(mine, root=comm.size - 1), torch.tensor([comm.size - 1]))
    assert hvd.broadcast_object(comm.rank, ranks=group) == comm.rank % 2
    hvd.barrier(ranks=group)
    with pytest.raises(UsageError, match="two names of one argument"):
        hvd.broadcast(mine, 0, root=0)
    with pytest.raises(UsageError, match="neither name nor process_set"):
        hvd.broadcast(mine, 0, name="x", ranks=group)


def _peers(comm: Any) -> range:
    return range(comm.rank % 2, comm.size, 2)


def test_broadcast_parameters_and_state_with_horovods_arguments(comm: Any) -> None:
    last = comm.size - 1
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (comm.rank + 1), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last, model=model)
    torch.manual_seed(last)
    check(model.weight.detach(), torch.nn.Linear(3, 2).weight.detach())
    assert optimizer.param_groups[0]["lr"] == 0.1 * (last + 1)


def test_sparse_allreduce(comm: Any) -> None:
    indices = torch.tensor([[comm.rank, 0, 4, 0], [0, 1, 1, 1]])
    mine = torch.sparse_coo_tensor(indices, torch.arange(4.0) + comm.rank, (5, 2), check_invariants=True)
    dense = hvd.allreduce(mine.to_dense(), op=hvd.Sum)
    check(hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)().to_dense(), dense)
    result = hvd.synchronize(hvd.sparse_allreduce_async(mine))
    assert result.is_sparse
    torch.testing.assert_close(result.to_dense(), dense / comm.size)
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (5, 2), check_invariants=True)
    mixed = hvd.sparse_allreduce_async(mine if comm.rank == 0 else empty, op=hvd.Sum)()
    assert mixed.to_dense().sum() == 6  # rank 0's 0 + 1 + 2 + 3
    with pytest.raises(UsageError, match="Average or Sum"):
        hvd.sparse_allreduce_async(mine, op=hvd.Max)
    with pytest.raises(UsageError, match="sparse COO"):
        hvd.sparse_allreduce_async(torch.ones(2))
