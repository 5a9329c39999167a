"""Hooks of every kind run as often as in one process for each microbatch, also with split backwards."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline

WIDTH, MICROBATCHES = 4, 4
calls: Counter[str] = Counter()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Layer(nn.Module):
    """Two linear layers; `between` receives the value between them."""

    def __init__(self, between: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.a, self.b, self.between = linear(), linear(), between

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            changed = self.between(h)
            h = h if changed is None else changed
        out: Tensor = self.b(torch.tanh(h))
        return out


def halved(gradient: Tensor) -> Tensor:
    calls["hook"] += 1
    return gradient * 0.5


def count(*args: Any) -> None:
    calls["hook"] += 1


def of_a_tensor(h: Tensor) -> None:
    h.register_hook(halved)


def of_a_node(h: Tensor) -> None:
    assert h.grad_fn is not None
    h.grad_fn.register_hook(count)


def before_a_node(h: Tensor) -> None:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(count)


def of_several(h: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook((h,), count)


kept: list[Tensor] = []


def retained(h: Tensor) -> None:
    h.retain_grad()
    kept.append(h)


class Packed(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, self.unpacked)

    def unpacked(self, tensor: Tensor) -> Tensor:
        calls["hook"] += 1
        return tensor


def unpacked(h: Tensor) -> Tensor:
    with Packed():
        return h * h.tanh()


def recomputed(h: Tensor) -> Any:
    def once(h: Tensor) -> Tensor:
        calls["hook"] += 1
        return h.tanh() * h

    return checkpoint(once, h, use_reentrant=False)


def recomputed_within(h: Tensor) -> Any:
    return checkpoint(torch.sin, h, use_reentrant=True)


def plain(h: Tensor) -> None:
    pass


def of_the_layer(model: nn.Sequential) -> None:
    layer: Any
    for layer in model:
        layer.a.register_full_backward_hook(count)
        layer.b.register_full_backward_pre_hook(count)
        layer.register_full_backward_hook(count)


def of_its_weights(model: nn.Sequential) -> None:
    layer: Any
    for layer in model:
        layer.a.weight.register_hook(halved)
        layer.b.weight.register_post_accumulate_grad_hook(count)
        torch.autograd.graph.register_multi_grad_hook(tuple(layer.parameters()), count)


def of_nothing(model: nn.Sequential) -> None:
    pass


WAYS: list[tuple[Any, Any]] = [
    (of_a_tensor, of_nothing), (of_a_node, of_nothing), (before_a_node, of_nothing), (of_several, of_nothing),
    (retained, of_nothing), (unpacked, of_nothing), (recomputed, of_nothing), (recomputed_within, of_nothing),
    (plain, of_the_layer), (plain, of_its_weights),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("schedule", "ways"), [("1f1b", WAYS[-2:]), ("zb_h1", WAYS), ("zb_v", WAYS[:1])])
def test_hooks_are_called_once(comm: Any, schedule: Any, ways: Any) -> None:
    """Regression: split backwards ran them in both parts, so that `register_hook(lambda g: g / 2)` gave a quarter."""
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for between, register in ways:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(between) for _ in range(2 * comm.size)))
        whole = copy.deepcopy(model)
        for one in (whole, model):
            register(one)
        calls.clear()
        kept.clear()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(whole(part), target) / MICROBATCHES).backward()
        expected, retained_norms = calls["hook"], sorted(h.grad.norm().item() for h in kept if h.grad is not None)
        calls.clear()
        kept.clear()
        pipe = pipeline(model, comm, schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
        pipe.step(x, y)
        text = f"{between.__name__}, {register.__name__}"
        assert sum(comm.all_gather_object(calls["hook"])) == expected, text
        norms = [h.grad.norm().item() for h in kept if h.grad is not None]
        norms = sorted(norm for own in comm.all_gather_object(norms) for norm in own)
        assert norms == pytest.approx(retained_norms, rel=1e-10), text
        theirs = dict(whole.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12, msg=f"{text}: {name}")
        pipe.close()
    assert "retain_grad" not in vars(Tensor)


class AddsItsWeight(nn.Module):
    """The incoming gradient itself becomes its weight's gradient: autograd does not copy it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.weight
        if out.requires_grad:
            out.register_hook(count)
        return out


def test_gradients_of_weights_do_not_share_memory_with_messages(comm: Any) -> None:
    """Regression: an unsplit backward kept a gradient in a message's memory, and the next message overwrote it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(2 * comm.size) for layer in (linear(), AddsItsWeight())))
    whole = copy.deepcopy(model)
    x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(whole(part), target) / 4).backward()
    pipe = pipeline(model, comm, schedule="zb_h1", microbatches=4, loss=F.mse_loss)
    pipe.step(x, y)
    theirs = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12)
    pipe.close()


def test_an_optimizer_in_a_hook_is_refused(comm: Any) -> None:
    """Regression: it stepped once per microbatch, so that weights silently differed from one process."""
    model = nn.Sequential(*[linear() for _ in range(comm.size)])
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(weight: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with pytest.raises((UsageError, PeerError), match=r"an optimizer steps within a batch|rank \d"):
        pipe.step(x, x)
    pipe.close()
