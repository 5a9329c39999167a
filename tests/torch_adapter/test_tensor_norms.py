"""Steps with divided parameters: PyTorch's own norms, replicas that would diverge, and optimizers with state."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert.experts import Experts
from commlib.tensor_parallel import Column, Row
from commlib_torch import DataParallel, DistributedOptimizer, broadcast_parameters, clip_grad_norm_
from commlib_torch.expert import MoE
from commlib_torch.tensor import gather_optimizer_state, gather_state_dict, parallelize

PLAN: Any = {"0": Column(), "2": Row()}
LIMIT = 0.05


def whole(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6)).double()


def backward(model: nn.Module, step: int = 0) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    (model(x) - x.flip(0)).square().sum().backward()


def close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def in_two(model: nn.Module, limit: float, kind: float) -> Tensor:
    """Clip by the two functions that make up PyTorch's."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None], kind)
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


CLIPS: dict[str, Callable[[nn.Module, float, float], Tensor]] = {
    "a list": lambda m, limit, kind: nn.utils.clip_grad_norm_(list(m.parameters()), limit, kind),
    "a generator": lambda m, limit, kind: nn.utils.clip_grad_norm_(m.parameters(), limit, kind),
    "values of a dict": lambda m, limit, kind: nn.utils.clip_grad_norm_(
        dict(m.named_parameters()).values(), limit, kind
    ),
    "in two": in_two,
    "one by one": lambda m, limit, kind: torch.stack(
        [nn.utils.clip_grad_norm_(one, limit, kind) for one in m.parameters()]
    ),
}


@pytest.mark.parametrize("kind", [2.0, 1, 3.0, math.inf])
@pytest.mark.parametrize("way", CLIPS)
def test_norms_of_pytorch_match_whole_weights(comm: Any, way: str, kind: float) -> None:
    """Regression: each rank used its own parts, and scaled whole weights by a different factor: LayerNorms diverged."""
    plain, model = whole(), parallelize(whole(), comm, PLAN)
    norms = []
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
        for step in range(2):
            backward(one, step)
            norms.append(CLIPS[way](one, LIMIT, kind))
            optimizer.step()
            optimizer.zero_grad()
    close(torch.stack(norms[2:]), torch.stack(norms[:2]))
    close(gather_state_dict(model), dict(plain.state_dict()))


@pytest.mark.parametrize("given", ["list", "generator", "values", "submodule"])
def test_our_clipping_accepts_any_list_of_parts(comm: Any, given: str) -> None:
    plain: Any = whole()
    model: Any = parallelize(whole(), comm, PLAN)
    norms = []
    for one, clip in ((plain, nn.utils.clip_grad_norm_), (model, clip_grad_norm_)):
        backward(one)
        lists: dict[str, Iterable[Tensor]] = {
            "list": [*one[0].parameters(), one[3].weight],
            "generator": (each for each in one.parameters()),
            "values": dict(one.named_parameters()).values(),
            "submodule": one[2].parameters(),
        }
        norms.append(clip(lists[given], LIMIT))
    close(norms[1], norms[0])
    close(model[3].weight.grad, plain[3].weight.grad)


def test_an_error_of_pytorch_is_raised_unchanged(comm: Any) -> None:
    model: Any = parallelize(whole(), comm, PLAN)
    backward(model)
    if comm.rank == comm.size - 1:
        model[0].weight.grad[0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_experts_count_as_a_whole(comm: Any) -> None:
    """Regression: each rank scaled the router by the norm of its own experts."""
    layer = MoE(6, Experts(2 * comm.size, hidden=4), comm).double()
    layer(torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).square().sum().backward()
    ours = clip_grad_norm_(layer.parameters(), math.inf)
    close(nn.utils.get_total_norm([one.grad for one in layer.parameters() if one.grad is not None]), ours)


def by_hand(model: nn.Module) -> None:
    """Clip with a user-defined norm."""
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(0.1 / norm)


@pytest.mark.parametrize("late", [1, 3, 70])
def test_diverging_ranks_are_reported(comm: Any, late: int) -> None:
    """Regression: with a norm of this rank's parts, whole weights silently differed among ranks."""
    model = parallelize(whole(), comm, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train() -> None:
        for step in range(1, 140):
            backward(model, step)
            if step >= late:
                by_hand(model)
            optimizer.step()
            optimizer.zero_grad()

    if comm.size == 1:
        train()
        return
    with pytest.raises(MismatchError, match=r"SGD.step on rank .* of shape \[6\], has norm .* on rank .*clip"):
        train()


def test_different_batches_along_the_axis_are_reported(comm: Any) -> None:
    if comm.size == 1:
        return
    model = parallelize(whole(), comm, PLAN)
    backward(model, comm.rank)
    with pytest.raises(MismatchError, match="the same batches and seeds"):
        torch.optim.AdamW(model.parameters()).step()


def test_gradients_of_rounding_errors_may_differ(comm: Any) -> None:
    """A whole weight without effect has a gradient of rounding errors, which may differ among ranks."""
    model = parallelize(whole(), comm, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    model[2].bias.grad = torch.full((6,), 1e-17 * (1 + comm.rank), dtype=torch.float64)
    optimizer.step()
    model[2].bias.grad = torch.full((6,), math.nan if comm.rank else 1.0, dtype=torch.float64)
    optimizer.step()  # no error


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "adamw, amsgrad, foreach": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.01),  # has state when it is created
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_earlier_optimizer_state_is_divided(comm: Any, kind: str, steps: int) -> None:
    """Regression: it was refused by an error about tensor sizes, although Keras divides it."""
    plain, model = whole(), whole()
    others = parallelize(whole(1), comm, PLAN)  # optimizers have been checked before
    backward(others)
    optimizers = [OPTIMIZERS[kind](one.parameters()) for one in (plain, model)]
    for step in range(steps + 3):
        if step == steps:
            parallelize(model, comm, PLAN)
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            backward(one, step)
            optimizer.step()
            optimizer.zero_grad()
    close(gather_state_dict(model), dict(plain.state_dict()))
    state = gather_optimizer_state(optimizers[1], model.named_parameters())["state"]
    for (name, _), kept in zip(plain.named_parameters(), optimizers[0].state_dict()["state"].values(), strict=True):
        close(state[name], kept)


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_whole_state_may_be_loaded_at_any_time(comm: Any) -> None:
    plain, model = whole(), parallelize(whole(), comm, PLAN)
    optimizers = [trained(one) for one in (plain, model)]
    trained_more = copy.deepcopy(optimizers[0].state_dict())
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(trained_more))
        backward(one, 7)
        optimizer.step()
    close(gather_state_dict(model), dict(plain.state_dict()))


@pytest.mark.filterwarnings("ignore:rank . of")
def test_state_of_another_part_is_refused(comm: Any, tmp_path: Any) -> None:
    """Regression: moments of another rank's part have the same shape, and were accepted."""
    model = parallelize(whole(), comm, PLAN)
    optimizer = trained(model)
    state = optimizer.state_dict()
    torch.save(state, tmp_path / "own.pt")
    everyone = comm.all_gather_object((tmp_path / "own.pt").read_bytes())
    backward(model)
    optimizer.load_state_dict(torch.load(io.BytesIO(everyone[comm.rank])))
    optimizer.step()
    if comm.size > 1:
        optimizer.load_state_dict(torch.load(io.BytesIO(everyone[comm.rank - 1])))
        with pytest.raises(
            UsageError, match=rf"AdamW keeps on rank {comm.rank} .*the shard of rank .*gather_state_dict"
        ):
            optimizer.step()


@pytest.mark.parametrize("way", ["optimizer", "wrapper"])
def test_marks_identify_their_mesh(comm: Any, way: str) -> None:
    """Regression: it was an error without mesh=, although marks identify the ranks with the same part."""
    mesh = Mesh(dp=-1, tp=2 if comm.size % 2 == 0 else 1)
    plain, model = whole(), parallelize(whole(mesh.coordinate("dp")), mesh["tp"], PLAN)
    broadcast_parameters(model.state_dict(), 0)
    close(gather_state_dict(model), dict(plain.state_dict()))
    wrapped = DataParallel(model) if way == "wrapper" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if way == "optimizer":
        DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(2):
        backward(wrapped, 10 * step + mesh.coordinate("dp"))
        optimizer.step()
        optimizer.zero_grad()
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(2):
        for place in range(mesh["dp"].size):
            backward(copy.copy(plain), 10 * step + place)
        for one in plain.parameters():
            assert one.grad is not None
            one.grad /= mesh["dp"].size
        reference.step()
        reference.zero_grad()
    close(gather_state_dict(model), dict(plain.state_dict()))
    mesh.close()


def test_a_mesh_without_replicas_reduces_nothing(comm: Any) -> None:
    mesh = Mesh(tp=-1)
    plain, model = whole(), parallelize(whole(), mesh["tp"], PLAN)
    broadcast_parameters(model.state_dict(), comm.size - 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for one, each in ((plain, reference), (model, optimizer)):
        backward(one)
        each.step()
    close(gather_state_dict(model), dict(plain.state_dict()))
    mesh.close()


@pytest.mark.parametrize("wrap", [lambda m: DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1)), DataParallel])
def test_a_model_must_be_divided_before_its_gradients_are_reduced(comm: Any, wrap: Any) -> None:
    """Regression: in the other order gradients had whole shapes: a RuntimeError in the first backward."""
    if comm.size == 1:
        return
    model = whole()
    wrapped = wrap(model)
    with pytest.raises(UsageError, match=r"gradient of 0.weight is reduced already .* shard the model first"):
        parallelize(model, comm, PLAN)
    del wrapped


def test_ranks_without_a_mesh_are_refused(comm: Any) -> None:
    """If only some stages have divided layers, ranks would reduce over different groups."""
    if comm.size == 1:
        return
    mesh = Mesh(pp=comm.size, tp=1)
    model = parallelize(whole(), mesh["tp"], PLAN) if comm.rank == 0 else whole()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(Exception, match="Pass mesh=mesh or ranks="):
        DistributedOptimizer(optimizer, model.named_parameters())
    mesh.close()
