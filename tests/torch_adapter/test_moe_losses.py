"""Losses of routers are recorded once per forward, with their gradients, even if forwards are recomputed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlib import Communicator, Mesh
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib_torch import gather_state_dict, pipeline
from commlib_torch.expert import MoE, auxiliary_loss
from commlib_torch.expert.losses import AuxiliaryLossModule
from tests.torch_adapter.expert_oracle import near
from tests.torch_adapter.test_moe_padding import WIDTH, dense

OPTIONS: Any = {"top_k": 2, "hidden": 6, "shared": 1, "balance_weight": 1.0, "z_weight": 0.5}


def build(comm: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    return MoE(WIDTH, Experts(2 * comm.size, **{**OPTIONS, **options}), comm).double()


def tokens(comm: Any, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(7 * seed + comm.rank)
    return torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64)


class Twice(nn.Module):
    """A block that calls its mixture twice; each call has its own loss."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.mlp = build(comm)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.sin(self.inner(x)))


REENTRANT, PLAIN = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
WAYS: dict[str, Callable[[Twice, Tensor], Tensor]] = {
    "plain": lambda block, x: PLAIN(block, x),
    "re-entrant": lambda block, x: REENTRANT(block, x),
    "re-entrant, each": lambda block, x: REENTRANT(block.inner, torch.sin(REENTRANT(block.inner, x))),
    "nested": lambda block, x: REENTRANT(lambda x: block.inner(torch.sin(REENTRANT(block.inner, x))), x),
    "nested thrice": lambda block, x: REENTRANT(lambda x: REENTRANT(lambda x: REENTRANT(block, x), x), x),
    "plain around": lambda block, x: PLAIN(lambda x: REENTRANT(block, x), x),
    "plain around more": lambda block, x: PLAIN(lambda x: torch.cos(REENTRANT(block, x)).square(), x),
    "plain within": lambda block, x: REENTRANT(lambda x: PLAIN(block, x), x),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_change_nothing(comm: Communicator, way: str) -> None:
    """Regression: re-entrant checkpoints lost the loss, and both kinds counted each token twice in statistics."""
    block = Twice(comm)
    other = copy.deepcopy(block)
    x = tokens(comm)
    results = []
    whole = (lambda block, x: torch.cos(block(x)).square()) if "more" in way else (lambda block, x: block(x))
    for model, call in ((block, whole), (other, WAYS[way])):
        given = x.clone().requires_grad_()
        for _ in range(2):  # gradients accumulate
            y = call(model, given)
            loss = auxiliary_loss(model)
            (3 * (torch.sin(y).sum() + loss)).backward()
        assert model.mlp.stats().tokens == 24 * comm.size
        assert int(model.mlp.mixture.load.sum()) == 48
        results.append((y.detach(), loss.detach(), given.grad, *(one.grad for one in model.parameters())))
    for one, again in zip(*results, strict=True):
        torch.testing.assert_close(again, one, rtol=1e-6, atol=1e-6)  # gates and losses are float32
    assert other.mlp.losses == []


def test_reentrant_checkpoints_refuse_a_late_backward_of_the_loss(comm: Communicator) -> None:
    """With re-entrant checkpointing the loss would lose its gradient if its backward ran by itself."""
    block = Twice(comm)
    y = REENTRANT(block, tokens(comm).requires_grad_())
    loss = auxiliary_loss(block)
    with pytest.raises(UsageError, match=r"MoE: the backward of its router's loss ran after.*use_reentrant=False"):
        loss.backward()
    y.sum().backward()
    with torch.no_grad():
        REENTRANT(block, tokens(comm))
    assert not auxiliary_loss(block).requires_grad
    frozen = Twice(comm).requires_grad_(False)  # the gradient passes through it
    x, also = tokens(comm).requires_grad_(), tokens(comm).requires_grad_()
    for given, call in ((x, REENTRANT), (also, lambda block, x: block(x))):
        y = call(frozen, given)
        (y.sum() + auxiliary_loss(frozen)).backward()
    assert x.grad is not None and also.grad is not None
    near(x.grad, also.grad, "gradient of the inputs", 1e-6)


def test_a_loss_with_weight_zero_is_not_recorded(comm: Communicator) -> None:
    """User code need not collect it."""
    model = build(comm, balance_weight=0.0, z_weight=0.0)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            model(tokens(comm)).sum().backward()
    assert not auxiliary_loss(model).requires_grad


class Own(AuxiliaryLossModule):
    def forward(self, x: Tensor) -> Tensor:
        self.keep(x.square().mean())
        return x


def test_a_frozen_router_reports_its_loss(comm: Communicator) -> None:
    """Regression: the loss was not reported if both the router and its input were frozen."""
    layer, x = build(comm), tokens(comm)
    layer(x)
    expected = auxiliary_loss(layer)
    layer.router.requires_grad_(False)
    for _ in range(2):
        layer(x).sum().backward()
    assert float(expected) > 0
    near(auxiliary_loss(layer), 2 * expected.detach(), "losses")
    assert float(auxiliary_loss(layer)) == 0
    with torch.no_grad():
        layer(x)
    assert float(auxiliary_loss(layer)) == 0


def test_user_defined_layers_can_have_losses(comm: Communicator) -> None:
    """The losses have a gradient if the forward has one."""
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UsageError, match=r"Own: the loss of a layer.*use_reentrant=False"):
        REENTRANT(Own(), x)
    own = Own()
    PLAIN(own, x).sum().backward()
    assert len(own.losses) == 1
    with torch.no_grad():
        own(x)
    assert len(own.losses) == 1


class OtherCheckpoint(torch.autograd.Function):
    """The checkpointing of another library."""

    @staticmethod
    def forward(ctx: Any, call: Any, x: Tensor) -> Tensor:
        ctx.call, ctx.x = call, x
        result: Tensor = call(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            ctx.call(x).backward(gradient)
        return None, x.grad


def test_foreign_checkpoints_are_reported(comm: Communicator) -> None:
    block = Twice(comm)
    y = OtherCheckpoint.apply(block, tokens(comm).requires_grad_())
    with pytest.warns(UserWarning, match=r"MoE: a forward without gradients is recomputed in the backward"):
        y.sum().backward()


def test_any_number_of_forwards(comm: Communicator) -> None:
    """Regression: the losses of more than 15 forwards were dropped, with a false warning."""
    model = build(comm)
    weights = {name: value.detach() for name, value in gather_state_dict(model).items()}
    x, total = tokens(comm), torch.zeros((), dtype=torch.float64)
    with warnings.catch_warnings(action="error"):
        for _ in range(40):
            total += dense(weights, model.options, x, torch.ones(2, 3, dtype=torch.bool))[1]
            x = x + 0.1 * model(x)
        near(auxiliary_loss(model).double(), total, "loss", 1e-4)


def test_losses_without_a_backward_are_warned_of(comm: Communicator) -> None:
    """If user code never collects them, a warning appears, and memory stays bounded; their sum is still correct."""
    model, expected = build(comm), build(comm)
    kept = []
    with warnings.catch_warnings(action="error"):
        for number in range(3):
            model(tokens(comm)).sum().backward(retain_graph=True)
            assert len(model.losses) == number + 1  # they may still be differentiated
            kept.append(weakref.ref(model.losses[-1]))
        taken = auxiliary_loss(model)
        taken.backward()
    for _ in range(5):
        with pytest.warns(UserWarning, match=r"MoE: a backward went through forwards without their router losses"):
            model(tokens(comm)).sum().backward()
            kept.append(weakref.ref(model.losses[-1]))
            model(tokens(comm)).sum().backward()
        assert len(model.losses) == 2
    for _ in range(10):
        expected(tokens(comm))
    near(auxiliary_loss(model), auxiliary_loss(expected), "loss", 1e-6)
    del taken
    gc.collect()
    assert all(one() is None for one in kept)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("how", ["none", "full", "selective", {"1": "full"}])
def test_stages_that_recompute_count_tokens_once(comm: Communicator, how: Any) -> None:
    """A token counts once, and so do the checks of the first batch."""
    if comm.size % 2:
        pytest.skip("2 stages")
    mesh = Mesh(pp=2, dp=-1)
    dp = mesh["dp"]
    torch.manual_seed(1)
    layers = nn.Sequential(*(MoE(WIDTH, Experts(4, hidden=4), mesh, name=f"mix {n}") for n in range(2)))
    pipe = pipeline(layers.double(), mesh["pp"], microbatches=2, loss=F.mse_loss, checkpoint=how)
    for _ in range(2):
        x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
        pipe.step(x, x)
    for layer in pipe.modules():
        if isinstance(layer, MoE):
            assert layer.stats().tokens == 24 * dp.size
    pipe.close()
    mesh.close()


def test_a_failed_forward_leaves_no_loss(comm: Communicator) -> None:
    """Regression: its loss was added to that of the next forward if the error had been caught."""
    layer, x = build(comm), tokens(comm)
    layer(x)
    once = auxiliary_loss(layer)

    def fail(module: Any, args: Any, out: Any) -> None:
        if comm.rank == comm.size - 1:
            raise ValueError("no result")

    hook = layer.experts.up.register_forward_hook(fail)
    with pytest.raises(Exception, match="no result"):
        layer(x)
    hook.remove()
    layer(x)
    near(auxiliary_loss(layer), once, "auxiliary loss", 1e-12)
