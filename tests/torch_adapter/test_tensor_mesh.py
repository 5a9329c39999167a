"""Divided layers with replicas and stages match one process with the whole batch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlib import Mesh
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib.tensor_parallel import Column, Row
from commlib_torch import DistributedOptimizer, GradScaler, pipeline
from commlib_torch.expert import MoE
from commlib_torch.pipelines._traced_model import TracedModel
from commlib_torch.tensor import gather_state_dict, parallelize

WIDTH = 6
PLAN: Any = {"*.up": Column(), "*.down": Row()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.again: bool | None = None
        """Compute activations again in backward; whether re-entrantly."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) if self.again is None else checkpoint(self.inner, x, use_reentrant=self.again)
        return out

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))).double()


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def alone(steps: int, limit: float = 0.1, rows: int = 4) -> tuple[nn.Module, list[Tensor]]:
    """Train in one process; return the model and its losses."""
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), 0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):  # accumulated
            x, y = batch(rows, 2 * step + part)
            loss = F.mse_loss(whole(x), y)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(whole.parameters(), limit)
        optimizer.step()
    return whole, losses


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("again", [None, False, True])
def test_replicas(comm: Any, again: bool | None) -> None:
    """Gradients of two batches are accumulated and clipped; activations and their collectives are recomputed."""
    if comm.size % 2:
        pytest.skip("two ranks divide the model")
    mesh = Mesh(dp=-1, tp=2)
    divided: Any = parallelize(model(), mesh["tp"], PLAN)
    for block in divided:
        block.again = again
    optimizer: Any = DistributedOptimizer(
        torch.optim.AdamW(divided.parameters(), 0.01), divided.named_parameters(), mesh=mesh,
        backward_passes_per_step=2, bucket_cap_mib=1e-4, first_bucket_mib=1e-4,
    )  # fmt: skip
    replicas, place = mesh.shape.size("dp"), mesh.coordinate("dp")
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            x, y = batch(4, 2 * step + part)
            own = slice(place * 4 // replicas, (place + 1) * 4 // replicas)
            loss = F.mse_loss(divided(x[own].requires_grad_(again is True)), y[own])
            loss.backward()
            losses.append(torch.from_numpy(mesh["dp"].all_reduce(loss.detach().numpy(), "mean")))
        optimizer.clip_grad_norm(0.1)
        optimizer.step()
    whole, expected = alone(3)
    close(losses, expected)
    close(gather_state_dict(divided), whole.state_dict())


def trained(pipe: Any, steps: int) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Train stages as `alone` does, with two batches per step; return the optimizer and the losses."""
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses += [pipe.step(*batch(4, 2 * step + part)) for part in range(2)]
        pipe.clip_grad_norm(0.1)
        optimizer.step()
    return optimizer, losses


@pytest.mark.ranks(min=4, max=4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("traced", [False, True])
def test_stages(comm: Any, schedule: Any, traced: bool) -> None:
    mesh = Mesh(pp=2, tp=2)
    divided = parallelize(model(), mesh["tp"], PLAN)
    pipe = pipeline(
        _Traced(divided) if traced else divided, mesh["pp"], schedule=schedule, microbatches=2, loss=F.mse_loss
    )
    optimizer, losses = trained(pipe, 3)
    whole, expected = alone(3)
    close(losses, expected)
    result = {name.removeprefix("layers."): value for name, value in pipe.gather_state_dict().items()}
    close(result, whole.state_dict())
    again = pipeline(model(), mesh["pp"], schedule="gpipe", microbatches=2, loss=F.mse_loss)  # not divided
    again.load_state_dict(result)
    other = torch.optim.AdamW(again.parameters(), 0.01)
    state = pipe.gather_optimizer_state(optimizer)
    if not traced:
        again.load_optimizer_state(other, state)
        for running, stepping in ((pipe, optimizer), (again, other)):
            stepping.zero_grad()
            running.step(*batch(4, 9))
            stepping.step()
        close(pipe.gather_state_dict(), again.gather_state_dict())


@pytest.mark.ranks(min=4, max=4)
def test_stages_that_keep_products(comm: Any) -> None:
    """Regression: a Row summed in memory kept by a selective checkpoint, so that gradients were silently wrong."""
    mesh = Mesh(pp=2, tp=2)
    pipe = pipeline(
        parallelize(model(), mesh["tp"], PLAN), mesh["pp"], microbatches=2, loss=F.mse_loss, checkpoint="selective"
    )
    _, losses = trained(pipe, 2)
    whole, expected = alone(2)
    close(losses, expected)
    close({name.removeprefix("layers."): one for name, one in pipe.gather_state_dict().items()}, whole.state_dict())


class _Traced(nn.Module):
    """A model that is no sequence, so that it is cut between operations."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.ranks(min=2)
def test_ranks_agree_on_the_loss_scale(comm: Any) -> None:
    """On an overflow in one rank's part, all skip the step and halve the scale."""
    divided: Any = parallelize(model().float(), comm, PLAN)
    optimizer = torch.optim.SGD(divided.parameters(), 0.01)
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = (part.float() for part in batch(4, step))
        scaler.scale(F.mse_loss(divided(x), y)).backward()
        before = gather_state_dict(divided)
        if step == 1 and comm.rank == comm.size - 1:
            divided[0].up.weight.grad[0, 0] = float("inf")
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(value, before[name]) for name, value in gather_state_dict(divided).items())
        assert changed == (step != 1)
        scales.append(scaler.get_scale())
    assert comm.all_gather_object(scales) == [[16.0, 8.0, 16.0]] * comm.size


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ["parts", "experts"])
def test_a_loss_scale_of_one_rank_is_refused(comm: Any, kind: str) -> None:
    """Regression: with torch's own scaler, a rank with an overflow silently skipped the step alone."""
    layer: Any = parallelize(model(), comm, PLAN) if kind == "parts" else MoE(8, Experts(2 * comm.size, hidden=4), comm)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = batch(4, 0)[0] if kind == "parts" else torch.ones(4, 8)
    scaler.scale(layer(x).sum()).backward()
    with pytest.raises(
        UsageError, match=r"looks for infinities.*different shards of weights.*GradScaler\(ranks=mesh\)"
    ):
        scaler.step(optimizer)
    right = GradScaler(ranks=comm, init_scale=8.0)
    right.scale(torch.zeros(()))
    right.step(optimizer)


def test_a_mesh_without_data_axes_is_refused(comm: Any) -> None:
    mesh = Mesh(tp=comm.size)
    network = model()
    with pytest.raises(UsageError, match=r"Mesh\(tp=\d\) has neither: add dp, or dp=1"):
        DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), network.named_parameters(), mesh=mesh)


# DistributedOptimizer refuses LBFGS itself.
@pytest.mark.parametrize(
    ("kind", "wrapped"), [("Adafactor", False), ("Adafactor", True), ("Muon", True), ("LBFGS", False)]
)
def test_optimizers_that_need_whole_weights_are_refused(comm: Any, kind: str, wrapped: bool) -> None:
    """A refusal changes nothing."""
    x, y = batch(2, 0)
    mesh = Mesh(dp=1, tp=-1)
    divided = parallelize(model(), mesh["tp"], PLAN)
    matrices = [parameter for parameter in divided.parameters() if parameter.dim() == 2]
    make = getattr(torch.optim, kind)
    optimizer = DistributedOptimizer(make(matrices), mesh=mesh) if wrapped else make(matrices)

    def loss() -> Tensor:
        optimizer.zero_grad()
        result = F.mse_loss(divided(x), y)
        result.backward()
        return result

    def step(of: Any) -> None:
        of.step(loss) if kind == "LBFGS" else of.step()

    loss()
    before = [matrix.detach().clone() for matrix in matrices]
    expected = rf"{kind} needs full weights, but parameter 0 of group 0 .* rank {comm.rank} of"
    with pytest.raises(UsageError, match=expected):
        step(optimizer)
    close(list(matrices), before)
    step(make([parameter for parameter in model().parameters() if parameter.dim() == 2][:1]))  # whole weights may


@pytest.mark.any_ranks
@pytest.mark.parametrize("traced", [False, True])
def test_plans_of_pipelined_models_are_checked(comm: Any, traced: bool) -> None:
    """Regression: a pipeline calls parts of the model, so that the check of its first call never ran."""
    mesh, x = Mesh(pp=comm.size, tp=1), batch(4, 0)[0]

    def piped(plan: Any, **options: Any) -> Any:
        layers = nn.Sequential(*(nn.Linear(*x.shape[-1:] * 2).double() for _ in range(2 * comm.size)))
        divided: Any = _Traced(layers) if traced else layers
        plan = {f"layers.{name}" if traced else name: style for name, style in plan.items()}
        divided = parallelize(divided, mesh["tp"], plan, **options.pop("given", {}))
        return pipeline(divided, mesh["pp"], microbatches=2, loss=F.mse_loss, **options)

    wrong, right = {"0": Column()}, {"0": Column(), "1": Row()}
    example = x[:2] if comm.rank == 0 else None
    with pytest.raises(UsageError, match="takes all features"):
        piped(wrong, example=example)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(right, example=example).close()
        piped(right, given={"example": x}).close()
    with pytest.warns(UserWarning, match="Pass example= to pipeline") if comm.rank == 0 else nullcontext():
        piped(wrong).close()


def test_tracing_a_model_is_not_its_first_call(comm: Any) -> None:
    """Regression: the first-call check ran on torch.fx's proxies."""
    inner = parallelize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), Mesh(tp=comm.size)["tp"], {"0": Column()})
    TracedModel(_Traced(inner), 1)
    with pytest.raises(UsageError, match="returns unsharded values"):
        inner(torch.zeros(2, WIDTH))
