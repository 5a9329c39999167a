"""Gradients kept by user code: they are views of buckets, but later steps must not change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commlib.devices.arrays import address
from commlib_torch import DataParallel, DistributedOptimizer, join

KEEPERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda grad: grad,
    "a part": lambda grad: grad[1:],
    "a reshaped one": lambda grad: grad.view(-1, 2),
    "detached": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.numpy(),
    "a part in numpy": lambda grad: grad.numpy()[:2],
    "dlpack": lambda grad: np.from_dlpack(grad),
    "storage": lambda grad: grad.untyped_storage(),
}


def values(kept: Any) -> list[float]:
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.tensor([], dtype=torch.float32).set_(kept)
    return sorted(set(np.asarray(kept).ravel().tolist()))


class Two(nn.Module):
    """The gradient of `one` equals the input; `other` shares its bucket, and `rare` is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(5))
        self.rare = nn.Parameter(torch.zeros(4))

    def forward(self, value: float, rare: bool = False) -> Tensor:
        total = value * self.one.sum() + (100 + value) * self.other.sum()
        return total + value * self.rare.sum() if rare else total


def wrapped(kind: str, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """Return the module to call and the optimizer."""
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    if kind == "DataParallel":
        return DataParallel(model, **options), plain
    return model, DistributedOptimizer(plain, model.named_parameters(), **options)


@pytest.mark.parametrize("kind", ["DistributedOptimizer", "DataParallel"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", KEEPERS)
def test_a_kept_gradient_does_not_change(comm: Any, kind: str, overlap: bool, how: str) -> None:
    """Regression: four gradients kept over zero_grad() were all 3, not 0, 1, 2 and 3."""
    model = Two()
    call, optimizer = wrapped(kind, model, overlap=overlap)
    kept = []
    for step in range(6):
        optimizer.zero_grad()
        call(float(step)).backward()
        optimizer.step()
        assert values(model.other.grad) == [100 + step]
        assert model.rare.grad is None
        kept.append(KEEPERS[how](model.one.grad))  # type: ignore[arg-type]
    assert [values(one) for one in kept] == [[step] for step in range(6)]


@pytest.mark.ranks(min=2)
def test_one_rank_may_keep_a_gradient_alone(comm: Any) -> None:
    """Its bucket moves to private memory, those of other ranks stay in symmetric memory, and the sums are correct."""
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model, op="sum")
    kept = []
    for step in range(5):
        optimizer.zero_grad()
        model(float(step + comm.rank)).backward()
        expected = step * comm.size + sum(range(comm.size))
        assert values(model.one.grad) == [expected]
        assert values(model.other.grad) == [100 * comm.size + expected]
        if comm.rank == comm.size - 1:
            kept.append((expected, model.one.grad))
        assert all(values(gradient) == [was] for was, gradient in kept)


@pytest.mark.ranks(min=2)
def test_memory_is_symmetric_again_once_no_gradient_is_kept(comm: Any) -> None:
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model, overlap=False)

    def step(value: float) -> Any:
        optimizer.zero_grad()
        model(value).backward()
        return optimizer.reducer.engine

    step(1)
    kept = model.one.grad
    assert step(2).is_private(0)
    assert step(3).is_private(0)
    assert kept is not None and values(kept) == [1]
    del kept
    engine = step(4)
    assert not engine.is_private(0)
    later = model.one.grad
    assert not step(5).is_private(0)  # the gradient of the previous step was kept, so the bucket is private now
    assert values(later) == [4] and values(model.one.grad) == [5]


@pytest.mark.ranks(min=2)
def test_buckets_do_not_move_without_kept_gradients(comm: Any) -> None:
    for set_to_none in (True, False):
        model = Two()
        _, optimizer = wrapped("DistributedOptimizer", model)
        for step in range(4):
            optimizer.zero_grad(set_to_none)
            model(float(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
        engine = optimizer.reducer.engine
        assert not any(engine.is_private(bucket.index) for bucket in engine.buckets)
        slots = {address(engine.slot(number)) for number in range(2)}
        assert {model.one.grad.data_ptr(), model.other.grad.data_ptr()} == slots  # type: ignore[union-attr]


def test_a_kept_gradient_accumulates_as_in_plain_torch(comm: Any) -> None:
    model, alone = Two(), Two()
    _, optimizer = wrapped("DistributedOptimizer", model, overlap=False)
    plain = torch.optim.SGD(alone.parameters(), lr=0.0)
    seen: list[list[list[float]]] = []
    for network, stepper in ((model, optimizer), (alone, plain)):
        kept, history = [], []
        for step in range(6):
            if step % 3 == 0:
                stepper.zero_grad(set_to_none=step == 3)
            network(float(step)).backward()
            kept.append(network.one.grad)
            kept.append(network.one.grad[:2])  # type: ignore[index]
            history.append([value for gradient in kept for value in values(gradient)])
        seen.append(history)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("passes", [2, 3])
def test_kept_with_several_backward_passes_per_step(comm: Any, passes: int) -> None:
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model, backward_passes_per_step=passes)
    kept = []
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(passes):
            model(float(step)).backward()
        optimizer.step()
        kept.append(model.one.grad.numpy())  # type: ignore[union-attr]
    assert [values(one) for one in kept] == [[passes * step] for step in range(4)]


@pytest.mark.ranks(min=2)
def test_a_kept_gradient_of_an_unused_parameter_does_not_change(comm: Any) -> None:
    """The slot of a missing gradient is filled with zeros, which must not change a kept gradient."""
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model)
    kept = []
    for step in range(1, 5):
        optimizer.zero_grad()
        model(float(step), rare=step % 2 == 1).backward()
        kept.append(model.rare.grad)
    assert [one if one is None else values(one) for one in kept] == [[1], None, [3], None]


@pytest.mark.ranks(min=2)
def test_a_kept_gradient_does_not_change_on_ranks_without_backward(comm: Any) -> None:
    """A rank without a loss contributes zeros in step(), which must not appear in its kept gradients."""
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model)
    model(2.0).backward()
    optimizer.step()
    kept = model.one.grad
    for _ in range(2):
        optimizer.zero_grad()
        if comm.rank == 0:
            model(4.0).backward()
        optimizer.step()
    assert kept is not None and values(kept) == [2]
    assert values(model.one.grad) == [pytest.approx(4 / comm.size)]


@pytest.mark.ranks(min=2)
def test_a_rank_that_joins_may_keep_gradients(comm: Any) -> None:
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model)
    kept = []
    for _ in range(2 if comm.rank == 0 else 4):
        optimizer.zero_grad()
        model(3.0).backward()
        kept.append(model.one.grad)
    expected = [3.0, 3.0] if comm.rank == 0 else [3.0, 3.0, *[3.0 * (comm.size - 1) / comm.size] * 2]
    join()
    assert [values(one) for one in kept] == [pytest.approx([value]) for value in expected]
    optimizer.close()


def test_a_closure_may_keep_gradients(comm: Any) -> None:
    model = Two()
    _, optimizer = wrapped("DistributedOptimizer", model)
    kept: list[Any] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(float(len(kept)))
        loss.backward()
        kept.append(model.one.grad)
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert [values(one) for one in kept] == [[0], [1], [2], [3]]


def test_an_optimizer_may_keep_gradients_in_its_state(comm: Any) -> None:
    """Regression: in methods with variance reduction, the difference of two gradients was zero."""

    class Difference(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.seen: list[float] = []

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            parameter = self.param_groups[0]["params"][0]
            before, self.state[parameter]["before"] = self.state[parameter].get("before"), parameter.grad
            if before is not None:
                self.seen.append(float((parameter.grad - before).max()))

    model = Two()
    optimizer = DistributedOptimizer(Difference(model.parameters()), model.named_parameters())
    for value in (1.0, 3.0, 7.0, 8.0):
        optimizer.zero_grad()
        model(value).backward()
        optimizer.step()
    assert optimizer.seen == [2, 4, 1]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_kept_with_create_graph(comm: Any, set_to_none: bool) -> None:
    """With create_graph autograd does not accumulate in place: it creates a new gradient, and the old one stays."""
    model, alone = Two(), Two()
    _, optimizer = wrapped("DistributedOptimizer", model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.0)
    seen = []
    for network, stepper in ((model, optimizer), (alone, plain)):
        kept: list[Tensor] = []
        for step in range(4):
            stepper.zero_grad(set_to_none)
            network(float(step)).backward(create_graph=True)
            kept.append(network.one.grad.detach())  # type: ignore[union-attr]
        seen.append([values(gradient) for gradient in kept])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float64])
def test_kept_in_other_dtypes(comm: Any, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
    kept = []
    for step in range(4):
        optimizer.zero_grad()
        (parameter * step).real.sum().backward()
        kept.append(parameter.grad)
    assert [gradient.real.float().tolist() for gradient in kept if gradient is not None] == [
        [float(step)] * 4 for step in range(4)
    ]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", ["fp16", "int8", "topk:ratio=0.1", "powersgd:rank=2", "dgc:ratio=0.1"])
def test_keeping_does_not_change_compressed_training(comm: Any, name: str) -> None:
    """Moving a bucket preserves the state of its compression: weights have the same bits."""
    ends = []
    for keeps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 20))
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = DistributedOptimizer(
            plain, model.named_parameters(), compression=name, compress_within_node=True, overlap=False
        )
        kept: list[Any] = []
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * step + comm.rank))
            (model(inputs) - inputs[:, :20]).square().mean().backward()
            if keeps and step < 4:
                kept.extend((p.grad, torch.clone(p.grad)) for p in model.parameters())  # type: ignore[arg-type]
            optimizer.step()
        assert all(torch.equal(was, copy) for was, copy in kept)
        ends.append([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert ends[0] == ends[1]
