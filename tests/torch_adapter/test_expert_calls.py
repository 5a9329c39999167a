"""Calls of user-defined experts: without rows, with writes to them, within checkpoints, and with errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, PeerError
from commlib.expert import Experts
from commlib_torch import DistributedOptimizer
from commlib_torch.expert import MoE, auxiliary_loss, expertize
from tests.torch_adapter.expert_mlp import MLP, WIDTH
from tests.torch_adapter.expert_oracle import compare_gradients, near, single


class Writing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class Again(MLP):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class AgainOfLayers(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda rows: F.gelu(self.up(rows)), x, use_reentrant=False)
        result: Tensor = checkpoint(self.down, hidden, use_reentrant=False)
        return result


class Reentrant(MLP):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


class Selective(MLP):
    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)
        return result


def plain() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


def layer(kind: Any, ranks: Any, options: Experts) -> MoE:
    torch.manual_seed(1)
    return MoE(WIDTH, options, ranks, expert=kind).double()


def rows(rank: int) -> Tensor:
    return torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("kind", [Writing, Again, AgainOfLayers, Reentrant, Selective])
def test_experts_compute_what_the_mlp_does(comm: Communicator, kind: Any) -> None:
    """Regression: experts received read-only views, and recomputation used the weights of all experts."""
    options = Experts(2 * comm.size, balance="none")
    own, whole = layer(kind, comm, options), layer(MLP, single(comm), options)
    x = rows(comm.rank).requires_grad_()
    every = torch.cat([rows(rank) for rank in range(comm.size)]).requires_grad_()
    y, expected = own(x), None
    if kind is Writing:
        for one in whole.experts.modules():
            if isinstance(one, MLP):
                one.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    expected = whole(every)
    mine = slice(6 * comm.rank, 6 * comm.rank + 6)
    near(y, expected[mine], "outputs")
    for out in (y, expected):
        torch.sin(out).sum().backward()
    assert x.grad is not None
    assert every.grad is not None
    near(x.grad, every.grad[mine], "gradient of inputs")
    compare_gradients(comm, own, whole)


def _policy(ctx: Any, op: Any, *args: Any, **options: Any) -> Any:
    kept = getattr(op, "overloadpacket", None) in (torch.ops.aten.mm, torch.ops.aten.addmm)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _every(ctx: Any, op: Any, *args: Any, **options: Any) -> Any:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("policy", [_policy, _every])
@pytest.mark.parametrize("kind", [plain, None])
def test_selective_checkpoints_around_experts(comm: Communicator, kind: Any, policy: Any) -> None:
    """Regression: products of experts were parts of one tensor, which PyTorch took for modified."""
    hidden: dict[str, Any] = {} if kind else {"hidden": 12, "gated": True}
    model = layer(kind, comm, Experts(2 * comm.size, **hidden))
    results = []
    for is_again in (False, True):
        x = rows(comm.rank).requires_grad_()
        if is_again:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        else:
            y = model(x)
        (torch.sin(y).sum() + auxiliary_loss(model)).backward()
        results.append([y.detach(), x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
        model.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Mean(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * x.abs().mean()


def test_experts_without_rows_have_zeros_as_gradients(comm: Communicator) -> None:
    """Regression: a mean over no rows is NaN, and so were the gradients of experts on a rank without tokens."""
    options = Experts(2 * comm.size, top_k=1, balance="none")
    own = layer(Mean, comm, options)
    with torch.no_grad():
        own.router.weight.zero_()  # all tokens go to the first one
    own(rows(comm.rank)).sum().backward()
    for name, one in own.experts.named_parameters():
        assert one.grad is not None, name
        assert torch.isfinite(one.grad).all(), name
        assert comm.rank == 0 or not one.grad.any(), name


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("boom in backward")


class Failing(MLP):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        result: Tensor = Boom.apply(y) if Failing.fails else y
        return result


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("where", ["backward", "router"])
def test_an_error_on_one_rank_reaches_the_others(comm: Communicator, where: str, chunks: int) -> None:
    """Regression: the others waited if it was raised in backward or by a hook of the router."""
    mesh = Mesh(dp=-1)
    model = layer(Failing, mesh, Experts(2 * comm.size, chunks=chunks, balance="none"))
    expected = None
    for step in range(5):
        is_odd = step in (1, 2) and comm.rank == 0
        Failing.fails = is_odd and where == "backward"
        hook = None
        if is_odd and where == "router":

            def fail(*_: Any) -> None:
                raise ValueError("boom in router")

            hook = model.router.register_forward_hook(fail)
        x = rows(comm.rank).requires_grad_()
        if step in (1, 2):
            with pytest.raises(ValueError if is_odd else PeerError, match="boom" if is_odd else "world|waited"):
                model(x).sum().backward()
            if chunks > 1:  # the communicator is abandoned
                break
        else:
            y = model(x)
            y.sum().backward()
            expected = y.detach() if expected is None else expected
            torch.testing.assert_close(y.detach(), expected, rtol=0, atol=0)
        if hook is not None:
            hook.remove()
    Failing.fails = False
    mesh.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("mixes", [False, True])
def test_identical_experts_may_have_equal_gradients(comm: Communicator, mixes: bool) -> None:
    """Regression: an error claimed that the gradients of identical copies of an MLP had already been reduced."""
    torch.manual_seed(1)
    mesh = Mesh(dp=-1)
    model = nn.Sequential(MLP()).double()
    built: Any = expertize(model, mesh, {"0": Experts(comm.size, top_k=1 if mixes else comm.size, copy=True)})
    with torch.no_grad():
        built[0].router.weight.zero_()
    optimizer = DistributedOptimizer(torch.optim.SGD(built.parameters(), 0.1), built.named_parameters(), mesh=mesh)
    for _ in range(2):
        (built(rows(comm.rank)).sum() + auxiliary_loss(built)).backward()
        if not mixes:
            optimizer.step()
            optimizer.zero_grad()
            continue
        for one in built[0].experts.parameters():
            comm.all_reduce(one.grad.numpy(), out=one.grad.numpy())
        with pytest.raises(MismatchError, match="gradients of different experts are the same"):
            optimizer.step()
        break
    mesh.close()


@pytest.mark.ranks(min=2)
def test_ranks_along_tp_with_different_tokens_are_refused_at_the_first_call(comm: Communicator) -> None:
    """Regression: the error came at a step, and named different gradients of shared weights."""
    mesh = Mesh(dp=1, tp=comm.size)
    for x in (rows(comm.rank), rows(0)[: 6 - comm.rank]):
        model = layer(None, mesh, Experts(4, hidden=4 * comm.size))
        with pytest.raises(MismatchError, match=r"ranks along tp have .*tokens, .*Remove sequence= and Sequence"):
            model(x)
    mesh.close()
