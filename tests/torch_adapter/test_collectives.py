"""The verbs on tensors: every dtype, any strides, in place and not, blocking and as Work."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import commlib
import commlib_torch as ct
from commlib.errors import UsageError

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]


def values(comm: Any, dtype: torch.dtype, rank: int | None = None, shape: tuple[int, ...] = (6, 2)) -> Tensor:
    """Small whole numbers that differ between ranks and are exact in every dtype."""
    rank = comm.rank if rank is None else rank
    numbers = torch.arange(int(np.prod(shape))).reshape(shape) % 5 + rank
    if dtype.is_complex:
        return (numbers + 1j * (numbers % 3)).to(dtype)
    return (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)


def everyone(comm: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    return [values(comm, dtype, rank, **options) for rank in range(comm.size)]


def total(comm: Any, dtype: torch.dtype, **options: Any) -> Tensor:
    stacked = torch.stack(everyone(comm, dtype, **options))
    return stacked.any(0) if dtype == torch.bool else stacked.sum(0).to(dtype)


def check(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected)


def test_rank_and_size(comm: Any) -> None:
    assert ct.is_initialized()
    assert ct.init() is commlib.world()
    assert (ct.rank(), ct.size()) == (comm.rank, comm.size)
    assert (ct.local_rank(), ct.local_size()) == (comm.node().rank, comm.node().size)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_all_reduce(comm: Any, dtype: torch.dtype) -> None:
    mine = values(comm, dtype)
    check(ct.all_reduce(mine), total(comm, dtype))
    check(mine, values(comm, dtype))  # untouched
    check(ct.all_reduce_async(mine).wait(), total(comm, dtype))
    assert ct.all_reduce_(mine) is mine
    check(mine, total(comm, dtype))
    mine = values(comm, dtype)
    work = ct.all_reduce_async_(mine)
    assert work.wait() is mine is work.result()
    assert work.done() and work.exception() is None
    check(mine, total(comm, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["mean", "min", "max", "prod"])
def test_other_operations(comm: Any, op: Any, dtype: torch.dtype) -> None:
    stacked = torch.stack(everyone(comm, dtype)).double()
    expected = {"mean": stacked.mean(0), "min": stacked.amin(0), "max": stacked.amax(0), "prod": stacked.prod(0)}[op]
    check(ct.all_reduce(values(comm, dtype), op), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["transposed", "strided", "expanded", "0-d", "empty", "requires grad", "conjugate"])
def test_every_form_of_tensor(comm: Any, form: str, dtype: torch.dtype) -> None:
    def make(rank: int) -> Tensor:
        base = values(comm, dtype, rank)
        forms = {
            "transposed": lambda: base.t(),
            "strided": lambda: base[::2, 1:],
            "expanded": lambda: base[:1, :1].expand(3, 4),
            "0-d": lambda: base[1, 1],
            "empty": lambda: base[:0],
            "requires grad": lambda: base.requires_grad_(),
            "conjugate": lambda: values(comm, torch.complex64, rank).conj(),
        }
        return forms[form]()

    tensor = make(comm.rank)
    expected = torch.stack([make(rank).detach().resolve_conj() for rank in range(comm.size)]).sum(0)
    check(ct.all_reduce(tensor).detach(), expected)
    check(ct.broadcast(tensor, comm.size - 1), make(comm.size - 1).detach())
    if form != "expanded":  # the elements of an expanded tensor share memory
        version = tensor._version
        with torch.no_grad():  # otherwise a leaf that requires a gradient cannot be overwritten
            assert ct.all_reduce_(tensor) is tensor
        check(tensor.detach(), expected)
        assert tensor._version > version  # autograd detects the write


def test_autograd_detects_writes_to_a_saved_tensor(comm: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    factor = torch.ones(3)
    loss = (weight * factor).sum()
    ct.all_reduce_(factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_movement(comm: Any, dtype: torch.dtype) -> None:
    mine, parts = values(comm, dtype), everyone(comm, dtype)
    last = comm.size - 1
    for gathered in (ct.all_gather(mine), ct.all_gather_async(mine).wait()):
        check(gathered, torch.cat(parts))
    uneven = mine[: comm.rank + 1]
    for gathered in (ct.all_gather_v(uneven), ct.all_gather_v_async(uneven).wait()):
        check(gathered, torch.cat([part[: rank + 1] for rank, part in enumerate(parts)]))
    for collected in (ct.gather(mine, last), ct.gather_async(mine, last).wait()):
        if comm.rank == last:
            check(collected, torch.cat(parts))
        else:
            assert collected is None
    whole = torch.cat(parts)
    argument = whole if comm.rank == last else None
    for scattered in (ct.scatter(argument, last), ct.scatter_async(argument, last).wait()):
        check(scattered, mine)
    for copied in (ct.broadcast(mine, last), ct.broadcast_async(mine, last).wait()):
        check(copied, parts[last])
    check(mine, parts[comm.rank])
    for in_place in (ct.broadcast_, lambda *a: ct.broadcast_async_(*a).wait()):
        target = values(comm, dtype)
        assert in_place(target, last) is target
        check(target, parts[last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_exchanges(comm: Any, dtype: torch.dtype) -> None:
    rows = everyone(comm, dtype, shape=(comm.size, 3))
    for received in (ct.all_to_all(rows[comm.rank]), ct.all_to_all_async(rows[comm.rank]).wait()):
        check(received, torch.stack([row[comm.rank] for row in rows]))
    splits = [(comm.rank + peer) % 3 for peer in range(comm.size)]
    sent = torch.cat([torch.full((n,), 10 * comm.rank + peer) for peer, n in enumerate(splits)]).to(dtype)
    for out, counts in (
        ct.all_to_all_v(sent, splits),
        ct.all_to_all_v(sent, torch.tensor(splits), takes=torch.tensor(splits)),
        ct.all_to_all_v_async(sent, splits).wait(),
        ct.all_to_all_v_async(sent, torch.tensor(splits), takes=splits).wait(),
    ):
        assert counts.tolist() == [(peer + comm.rank) % 3 for peer in range(comm.size)]
        check(out, torch.cat([torch.full((int(n),), 10 * p + comm.rank) for p, n in enumerate(counts)]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_to_some(comm: Any, dtype: torch.dtype) -> None:
    mine, sums = values(comm, dtype), total(comm, dtype)
    last = comm.size - 1
    for reduced in (ct.reduce(mine, "sum", last), ct.reduce_async(mine, "sum", last).wait()):
        if comm.rank == last:
            check(reduced, sums)
        else:
            assert reduced is None
    counts = [6 // comm.size + (rank < 6 % comm.size) for rank in range(comm.size)]
    for part in (ct.reduce_scatter(mine), ct.reduce_scatter_async(mine).wait()):
        check(part, sums.split(counts)[comm.rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_scans_and_uneven_shards(comm: Any, dtype: torch.dtype) -> None:
    mine, parts = values(comm, dtype), everyone(comm, dtype)
    for scanned in (ct.scan(mine), ct.scan_async(mine).wait()):
        check(scanned, torch.stack(parts[: comm.rank + 1]).sum(0).to(dtype))
    check(ct.scan(mine, "max"), parts[comm.rank])
    for before in (ct.exscan(mine), ct.exscan_async(mine).wait()):
        if comm.rank == 0:
            assert before is None
        else:
            check(before, torch.stack(parts[: comm.rank]).sum(0).to(dtype))
    counts = [6, *[0] * (comm.size - 1)] if comm.size < 3 else [1, 3, 2, *[0] * (comm.size - 3)]
    for given in (counts, torch.tensor(counts)):
        for part in (ct.reduce_scatter_v(mine, given), ct.reduce_scatter_v_async(mine, given).wait()):
            check(part, total(comm, dtype).split(counts)[comm.rank])
    check(ct.reduce_scatter_v(mine, counts, "max"), parts[-1].split(counts)[comm.rank])


def test_algorithms(comm: Any) -> None:
    """Every verb with a choice of algorithm passes it on, and refuses an unknown one."""
    mine, parts, root = values(comm, torch.float32), everyone(comm, torch.float32), comm.size - 1
    sums, rows = total(comm, torch.float32), values(comm, torch.float32, shape=(comm.size, 2))
    counts = [6, *[0] * (comm.size - 1)]
    calls: dict[str, Any] = {
        "direct": [
            (lambda how: ct.all_reduce(mine, algorithm=how), sums),
            (lambda how: ct.all_reduce_(mine.clone(), algorithm=how), sums),
            (lambda how: ct.reduce_scatter(rows, algorithm=how), None),
            (lambda how: ct.reduce_scatter_v(mine, counts, algorithm=how), sums.split(counts)[comm.rank]),
        ],
        "pairwise": [(lambda how: ct.all_to_all(rows, algorithm=how), None)],
        "ring": [(lambda how: ct.all_gather(mine, algorithm=how), torch.cat(parts))],
        "binomial_tree": [
            (lambda how: ct.reduce(mine, root=root, algorithm=how), sums if comm.rank == root else None),
            (lambda how: ct.gather(mine, root, algorithm=how), torch.cat(parts) if comm.rank == root else None),
            (lambda how: ct.scatter(torch.cat(parts), root, algorithm=how), mine),
            (lambda how: ct.broadcast(mine, root=root, algorithm=how, ranks=comm), parts[root]),
            (lambda how: ct.broadcast_(mine.clone(), root=root, algorithm=how, ranks=comm), parts[root]),
        ],
    }
    for algorithm, several in calls.items():
        for call, expected in several:
            got = call(algorithm)
            if expected is not None:
                check(got, expected)
            with pytest.raises(UsageError, match="no such algorithm"):
                call("no such algorithm")
    with pytest.raises(UsageError, match="algorithm= selects an algorithm of the ordered verb: give ranks= too"):
        ct.broadcast(mine, root=0, algorithm="binomial_tree")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_messages(comm: Any, dtype: torch.dtype) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = values(comm, dtype), values(comm, dtype, left)
    for run in (ct.send_recv, lambda *a: ct.send_recv_async(*a).wait()):
        out = torch.zeros(2, 6, dtype=dtype).t()  # not contiguous
        assert run(mine, right, out, left) is out
        check(out, theirs)
    out = torch.zeros_like(mine)
    work = ct.recv_async(out, left, 3)
    ct.send_async(mine, right, 3).wait()
    assert work.wait() is out
    check(out, theirs)
    if comm.size > 1 and comm.rank < 2:
        out = torch.zeros_like(mine)
        if comm.rank == 0:
            ct.send(mine, 1)
            ct.recv(out, 1)
        else:
            ct.recv(out, 0)
            ct.send(mine, 0)
        check(out, values(comm, dtype, 1 - comm.rank))


def test_objects_and_barrier(comm: Any) -> None:
    ct.barrier()
    ct.barrier_async().wait()
    assert ct.broadcast_object({"rank": comm.rank}) == {"rank": 0}
    assert ct.broadcast_object_async(comm.rank, comm.size - 1).wait() == comm.size - 1
    assert ct.all_gather_object(str(comm.rank)) == [str(rank) for rank in range(comm.size)]
    assert ct.all_gather_object_async(comm.rank).wait() == list(range(comm.size))


def test_a_group(comm: Any) -> None:
    group = comm.split(comm.rank % 2, comm.rank)
    ranks = range(comm.rank % 2, comm.size, 2)
    check(ct.all_reduce(torch.tensor([comm.rank]), ranks=group), torch.tensor([sum(ranks)]))


def test_symmetric_memory_is_reduced_in_place(comm: Any) -> None:
    array = comm.empty(5000, "bfloat16")
    tensor = ct._bridge.to_tensor(array)
    tensor.fill_(comm.rank + 1)
    ct.all_reduce_(tensor)
    assert tensor.dtype == torch.bfloat16
    assert set(array.astype("float32")) == {comm.size * (comm.size + 1) / 2}


def test_invalid_arguments_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="device meta"):
        ct.all_reduce(torch.empty(2, device="meta"))
    with pytest.raises(UsageError, match="to_dense"):
        ct.all_reduce(torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match="expected a torch tensor, got ndarray"):
        ct.all_reduce(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="float8"):
        ct.all_reduce(torch.zeros(2).to(torch.float8_e5m2))
    with pytest.raises(UsageError, match="unknown operation"):
        ct.all_reduce(torch.zeros(2), "avg")  # type: ignore[arg-type]
