"""torch.compile of models, verbs and whole steps: graphs break at communication."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib_torch as ct
from commlib.errors import UsageError

from .oracle import assert_close, batch, gradients_of, loss_of, mine, model, parameters_of


def steps_alone(comm: Any, count: int) -> list[Tensor]:
    alone = model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(count):
        plain.zero_grad()
        loss_of(alone, batch(comm, step)).backward()
        plain.step()
    return parameters_of(alone)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_a_scripted_model(comm: Any, wrapper: str) -> None:
    """Regression: its parameters are in no dict, and DataParallel failed in its forward."""
    network = torch.jit.script(model())
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    called = ct.DataParallel(network) if wrapper == "module" else network
    if wrapper == "optimizer":
        optimizer = ct.DistributedOptimizer(optimizer, network.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(called, mine(comm, batch(comm, step))).backward()
        optimizer.step()
    assert_close(parameters_of(network), steps_alone(comm, 3))


@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_a_whole_step(comm: Any, wrapper: str) -> None:
    """Regression: the compiler traced into the core and the allocation of shared memory."""
    torch.compiler.reset()
    network: Any = model()
    called: Any = network
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    if wrapper == "optimizer":
        optimizer = ct.DistributedOptimizer(optimizer, network.named_parameters(), bucket_cap_mib=1e-4)
    else:
        called = ct.DataParallel(network, bucket_cap_mib=1e-4)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(called, (inputs, targets))
        loss.backward()
        if wrapper == "optimizer":
            optimizer.clip_grad_norm(1e9)
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    for number in range(3):
        compiled(*mine(comm, batch(comm, number)))
    assert_close(parameters_of(network), steps_alone(comm, 3))


def test_a_model_before_it_is_wrapped_and_after(comm: Any) -> None:
    torch.compiler.reset()
    for after in (False, True):
        network: Any = model()
        inner: Any = network if after else torch.compile(network, backend="eager")
        called: Any = ct.DataParallel(inner)
        if after:
            called = torch.compile(called, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(called, mine(comm, batch(comm, number))).backward()
            optimizer.step()
        assert_close(parameters_of(network), steps_alone(comm, 2))


def test_verbs_within_a_graph(comm: Any) -> None:
    torch.compiler.reset()
    size = comm.size

    def verbs(x: Tensor) -> Tensor:
        summed = ct.all_reduce(x * 2) + 1
        gathered = ct.all_gather(x + 1)
        return summed.sum() + gathered.sum() + ct.allreduce(x, name="in a graph", op=ct.Sum).sum()

    x = torch.full((3,), comm.rank + 1.0)
    total = size * (size + 1) / 2
    for _ in range(2):
        assert torch.compile(verbs, backend="eager")(x).item() == 6 * total + 3 + 3 * (total + size) + 3 * total


def test_a_step_of_a_pipeline(comm: Any) -> None:
    """Regression: the compiler traced into the schedule and dropped a context that watches the loss."""
    torch.compiler.reset()
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(comm.size + 1)))
    alone = copy.deepcopy(network)
    pipe = ct.pipeline(network, comm, microbatches=2, loss=F.mse_loss)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return 2 * pipe.step(x * 1, y)  # type: ignore[no-any-return]

    for _ in range(2):
        expected = F.mse_loss(alone(x), y)
        expected.backward()
        assert_close([torch.compile(step, backend="eager")(x, y)], [2 * expected.detach()])
    assert_close([torch.compile(pipe.step, backend="eager")(x, y)], [expected.detach()])
    expected = F.mse_loss(alone(x), y)
    expected.backward()
    assert_close([torch.compile(pipe.evaluate, backend="eager")(x, y)], [expected.detach()])
    theirs = dict(alone.named_parameters())
    assert_close([p.grad for p in pipe.parameters()], [theirs[name].grad for name, _ in pipe.named_parameters()])
    pipe.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_compiled_autograd_is_refused_by_name(comm: Any, wrapper: str) -> None:
    """It does not signal the end of a backward: gradients stayed local until the step, or for good."""
    torch.compiler.reset()
    network: Any = model()
    called: Any = network
    if wrapper == "optimizer":
        wrapped: Any = ct.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    else:
        wrapped = called = ct.DataParallel(network)
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(lambda *data: loss_of(called, data).backward(), backend="eager")
        with pytest.raises(UsageError, match="compiled autograd"):
            step(*mine(comm, batch(comm)))
    network.zero_grad()
    loss_of(called, mine(comm, batch(comm))).backward()
    alone = model()
    loss_of(alone, batch(comm)).backward()
    assert_close(gradients_of(network), gradients_of(alone))
    del wrapped


def test_importing_the_adapter_does_not_load_the_compiler() -> None:
    """No part of the compiler is loaded on import; it is configured once it is loaded."""
    code = (
        "import sys, commlib_torch; print('torch._dynamo' in sys.modules); import torch._dynamo, commlib; "
        "print(torch._dynamo.trace_rules.check_file(commlib.__file__).skipped)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.split() == ["False", "True"], run.stdout


@pytest.mark.parametrize("kind", ["wrapped", "in place"])
@pytest.mark.parametrize("plan", ["auto", "named"])
def test_a_divided_model_can_be_compiled(comm: Any, kind: str, plan: str) -> None:
    """Regression: the checks were traced with the model, and layers had unknown names."""
    torch.compiler.reset()
    inner: Any = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()
    alone, x = copy.deepcopy(inner), torch.rand(4, 8).double()
    compiled: Any = inner
    if kind == "wrapped":
        compiled = torch.compile(inner, backend="eager")
    else:
        inner.compile(backend="eager")
    reports: list[str] = []
    given: Any = "auto" if plan == "auto" else {"0": ct.Column(), "2": ct.Row()}
    divided = ct.parallelize(compiled, comm, given, example=x, report=reports.append)
    assert divided is compiled and not any("_orig_mod" in line for line in reports)
    assert isinstance(inner[0].style, ct.Column)
    for network in (divided, alone):
        network(x).square().sum().backward()
    torch.testing.assert_close(divided(x), alone(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(inner[2].bias.grad, alone[2].bias.grad, rtol=0, atol=1e-10)
