"""Gradients of the ordered verbs: first and second ones match one process with the data of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import commlib_torch as ct
from commlib.errors import MismatchError, UsageError
from tests.bodies import verb_gradients
from tests.bodies.verb_gradients import CASES, Array, Case


def zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def differentiate(case: Case, comm: Any, x: Array, weights: Array) -> tuple[Any, Any, Any]:
    tensor = torch.tensor(x, requires_grad=True)
    result = case.call(ct, tensor, comm, zeros)
    (gradient,) = torch.autograd.grad((torch.tensor(weights) * result.square()).sum(), tensor, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), tensor)
    return result.detach().numpy(), gradient.detach().numpy(), second.numpy()


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_one_process(comm: Any, name: str) -> None:
    case = CASES[name]
    verb_gradients.check(case, comm, lambda x, weights: differentiate(case, comm, x, weights))


def model(x: Tensor, comm: Any) -> Tensor:
    """A function of several verbs, in which the result of each feeds another."""
    y = ct.all_gather(x.sin(), ranks=comm)
    z = ct.reduce_scatter(y.square() * (comm.rank + 1), ranks=comm)
    mean = ct.all_reduce(z.mean(), "mean", ranks=comm)
    shared = ct.broadcast(z.cos() * mean, root=comm.size - 1, ranks=comm)
    return (ct.scan(shared * x, ranks=comm) * z).sum()


def test_finite_differences_across_ranks(comm: Any) -> None:
    x = np.random.default_rng(comm.rank).standard_normal((2, 2))
    tensor = torch.tensor(x, requires_grad=True)
    model(tensor, comm).backward()

    def loss(x: Array) -> float:
        with torch.no_grad():
            return float(model(torch.tensor(x), comm))

    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), verb_gradients.slopes(comm, loss, x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_other_dtypes_and_forms(comm: Any, dtype: torch.dtype) -> None:
    """Small whole numbers are exact. The tensors and their gradients are not contiguous."""
    base = (torch.arange(6).reshape(3, 2) + comm.rank).to(dtype).requires_grad_()
    result = ct.all_gather(base.t(), ranks=comm)
    factor = torch.full((2 * comm.size, 1), comm.rank + 1).to(dtype)
    (result * factor).sum().real.backward()  # the gradient is expanded
    total = comm.size * (comm.size + 1) // 2
    assert base.grad is not None and base.grad.dtype == dtype
    assert torch.equal(base.grad, torch.full((3, 2), total).to(dtype))


def test_in_place(comm: Any) -> None:
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    y = x * 2
    assert ct.all_reduce_(y, ranks=comm) is y
    z = y * 3
    assert ct.broadcast_(z, root=comm.size - 1, ranks=comm) is z
    (z * (comm.rank + 1)).sum().backward()
    # z is the root's on all ranks, so only its y has a gradient; y is a sum, which passes it to all ranks.
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 6.0 * comm.size * (comm.size + 1) / 2))


def test_a_part_of_a_tensor_in_place(comm: Any) -> None:
    x = torch.full((4,), comm.rank + 1.0, requires_grad=True)
    whole = x * 1
    ct.all_reduce_(whole[1:3], ranks=comm)
    assert whole[1] == comm.size * (comm.size + 1) / 2 and whole[0] == comm.rank + 1
    whole.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, comm.size, comm.size, 1]


def test_in_place_on_leaves_is_refused_before_anything_is_sent(comm: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    for call in (
        lambda: ct.all_reduce_(weight, ranks=comm),
        lambda: ct.broadcast_(weight, root=0, ranks=comm),
        lambda: ct.all_reduce_(weight[:2], ranks=comm),
    ):
        with pytest.raises(UsageError, match=r"leaf that requires a gradient.*rank|rank \d.*leaf that requires a grad"):
            call()
    with pytest.raises(UsageError, match="received into requires a gradient"):
        ct.send_recv(torch.ones(4), comm.rank, weight * 1, comm.rank, ranks=comm)
    with pytest.raises(UsageError, match=f"recv, rank {comm.rank}: no gradient flows.*receive into another tensor"):
        ct.recv(weight, 0, ranks=comm)
    with torch.no_grad():
        assert ct.all_reduce_(weight, ranks=comm) is weight
    assert weight.is_leaf and weight[0] == comm.size


REFUSED = {
    "reduce": (lambda x, comm: ct.reduce(x, ranks=comm), "call all_reduce"),
    "gather": (lambda x, comm: ct.gather(x, ranks=comm), "call all_gather"),
    "exscan": (lambda x, comm: ct.exscan(x, ranks=comm), "call scan, and subtract"),
    "send": (lambda x, comm: ct.send(x, comm.rank, ranks=comm), "call send_recv"),
    "all_reduce max": (lambda x, comm: ct.all_reduce(x, "max", ranks=comm), "only sum and mean have one"),
    "reduce_scatter prod": (lambda x, comm: ct.reduce_scatter(x, "prod", ranks=comm), "only sum and mean have one"),
    "scan min": (lambda x, comm: ct.scan(x, "min", ranks=comm), "only sum has one"),
    "all_reduce_ max": (lambda x, comm: ct.all_reduce_(x * 1, "max", ranks=comm), "only sum and mean have one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_verbs_without_a_backward_are_refused_before_anything_is_sent(comm: Any, name: str) -> None:
    call, text = REFUSED[name]
    x = torch.ones(comm.size, requires_grad=True)
    with pytest.raises(UsageError, match=rf"rank {comm.rank}: .*{text}.*pass tensor.detach\(\), or .*torch.no_grad"):
        call(x, comm)
    if name != "send":
        call(x.detach(), comm)
        with torch.no_grad():
            call(x, comm)


def test_asynchronous_verbs_are_refused(comm: Any) -> None:
    x = torch.ones(comm.size, requires_grad=True)
    for start in (ct.all_reduce_async, ct.all_reduce_async_, ct.all_gather_async, ct.scan_async, ct.send_async):
        given = (0,) if start is ct.send_async else ()
        with pytest.raises(UsageError, match=r"_async, rank \d: the tensor requires a gradient.*tensor.detach\(\)"):
            start(x, *given, ranks=comm)
    with pytest.raises(UsageError, match="broadcast_async, rank"):
        ct.broadcast_async(x, root=0, ranks=comm)
    with torch.no_grad():
        assert ct.all_reduce_async(x, ranks=comm).wait().tolist() == [comm.size] * comm.size


def test_without_a_gradient_nothing_is_recorded(comm: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not ct.all_reduce(x, ranks=comm).requires_grad
    with torch.inference_mode():
        assert not ct.all_gather(x, ranks=comm).requires_grad
    assert not ct.all_reduce(x.detach(), ranks=comm).requires_grad
    assert ct.all_reduce(x, ranks=comm).requires_grad


@pytest.mark.ranks(min=2)
def test_a_gradient_on_some_ranks_only(comm: Any) -> None:
    """A backward would wait for ranks that run none, or match it with another of their calls."""
    group = comm.split(0)
    x = torch.ones(3, requires_grad=comm.rank == 0)
    with pytest.raises(MismatchError, match="all_reduce of 3 x float32, op=sum, algorithm=auto, with gradient"):
        ct.all_reduce(x, ranks=group)


@pytest.mark.ranks(min=2)
def test_a_backward_on_some_ranks_only(comm: Any) -> None:
    """A rank that does not use a result skips its backward and makes the next call, which looks the same."""
    group = comm.split(0)
    x = torch.ones(3, requires_grad=True)
    y = ct.all_reduce(x, ranks=group)
    with pytest.raises(MismatchError, match="of gradients"):
        if comm.rank == 0:
            y.sum().backward()
        else:
            ct.all_reduce(torch.ones(3), ranks=group)


def test_backward_runs_the_verbs_in_reverse_order_whatever_else_is_in_the_graph(comm: Any) -> None:
    """Two verbs have equal signatures: if they were confused, gradients would be silently wrong."""
    group = comm.split(0)
    for turn in range(4):
        x = torch.full((2,), 1.0, requires_grad=True)
        first = ct.all_reduce(x, ranks=group)
        first = first.sin().exp() if (comm.rank + turn) % 2 else first * 1
        second = ct.all_reduce(x * 1, ranks=group)
        for _ in range((comm.rank * turn) % 3):
            second = second + 1
        parts = [(first * 0).sum() if (comm.rank + turn) % 2 else first.sum(), (second * 10).sum()]
        if (comm.rank + turn) % 3 == 0:
            parts.reverse()
        (parts[0] + parts[1]).backward()
        plain = sum((rank + turn) % 2 == 0 for rank in range(comm.size))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((2,), plain + 10.0 * comm.size))


def test_verbs_within_recomputed_functions(comm: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)

    def part(x: Tensor) -> Tensor:
        return ct.all_reduce(x.square(), ranks=comm).sin()

    (expected,) = torch.autograd.grad(part(x).sum(), x)
    (got,) = torch.autograd.grad(checkpoint(part, x, use_reentrant=False).sum(), x)
    assert torch.equal(got, expected)


def test_within_a_compiled_function(comm: Any) -> None:
    """The graph breaks at a verb; the code before and after it is compiled."""
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (ct.all_reduce(x.square(), ranks=comm) * 2).sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    torch._dynamo.reset()
    (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    assert torch.equal(got, expected)


def test_function_transforms_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match=r"torch.func.grad.* do not support ordered verbs"):
        torch.func.grad(lambda x: ct.all_reduce(x, ranks=comm).sum())(torch.ones(2))


def test_inputs_are_freed(comm: Any) -> None:
    import weakref

    x = torch.ones(1000, requires_grad=True)
    inner = x * 2
    seen = weakref.ref(inner)
    y = ct.all_gather_v(inner, ranks=comm)
    del inner
    assert seen() is None
    y.sum().backward()
    assert x.grad is not None and (x.grad == 2 * comm.size).all()


@pytest.mark.parametrize("kind", ["slice", "conjugate"])
def test_a_message_received_into_a_view_has_a_gradient(comm: Any, kind: str) -> None:
    """Autograd takes a written view for the first tensor of a function."""
    dtype = torch.float64 if kind == "slice" else torch.complex128
    x = torch.full((2,), comm.rank + 1.0, dtype=dtype, requires_grad=True)
    buffer = torch.zeros(4, dtype=dtype)
    target = buffer[1:3] if kind == "slice" else torch.zeros(2, dtype=dtype).conj()
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = ct.send_recv(x * x, to, target, source, ranks=comm)
    (received.abs().square().sum() * (comm.rank + 1)).backward()
    # The peer's loss is (to + 1) * x^4.
    expected = torch.full((2,), 4.0 * (comm.rank + 1) ** 3 * (to + 1), dtype=dtype)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-10)


def test_forward_mode_is_refused(comm: Any) -> None:
    """The tangent would be lost, which is a derivative of zero."""
    x = torch.ones(2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (ct.all_reduce, ct.all_reduce_async, ct.all_gather, ct.scan):
            with pytest.raises(UsageError, match="forward-mode"):
                call(dual, ranks=comm)
        assert ct.all_reduce(x, ranks=comm).tolist() == [comm.size] * 2
    for transform in (lambda: torch.func.jvp(ct.all_reduce, (x,), (x,)), lambda: torch.func.vmap(ct.all_reduce)(x)):
        with pytest.raises(UsageError, match=r"forward-mode|function transforms \(torch.func.grad, vmap"):
            transform()


def sharded(x: Tensor, comm: Any) -> Tensor:
    result: Tensor = ct.ParallelMLP(2, 2 * comm.size, comm).double()(x)
    return result


def mixture(x: Tensor, comm: Any) -> Tensor:
    result: Tensor = ct.MoE(2, ct.Experts(comm.size, top_k=1, hidden=3, balance="none"), comm).double()(x)
    return result


COMMUNICATING: dict[str, Any] = {
    "allreduce": lambda x, comm: ct.allreduce(x),
    "allgather": lambda x, comm: ct.allgather(x),
    "reducescatter": lambda x, comm: ct.reducescatter(x),
    "alltoall": lambda x, comm: ct.alltoall(x, torch.full((comm.size,), 2))[0],
    "broadcast": lambda x, comm: ct.broadcast(x, 0),
    "SyncBatchNorm": lambda x, comm: ct.SyncBatchNorm(2).double()(x),
    "ParallelMLP": sharded,
    "MoE": mixture,
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", [*COMMUNICATING, *CASES])
@pytest.mark.parametrize("is_vmap", [False, True], ids=["is_grads_batched", "vmap"])
def test_batches_of_gradients_are_refused(comm: Any, name: str, is_vmap: bool) -> None:
    """Regression: PyTorch's errors did not name the reason."""
    case = CASES.get(name)
    shape = case.shape(comm.rank, comm.size) if case else (2 * comm.size, 2)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    y = case.call(ct, x, comm, zeros) if case else COMMUNICATING[name](x, comm)
    batch = torch.ones(3, *y.shape, dtype=y.dtype)
    with pytest.raises(UsageError, match=r"function transforms \(torch.func.grad, vmap, .*is_grads_batched"):
        if is_vmap:
            torch.func.vmap(lambda one: torch.autograd.grad(y, x, one, retain_graph=True)[0])(batch)
        else:
            torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, batch[0])
    assert ct.all_reduce(torch.ones(1), ranks=comm).item() == comm.size
