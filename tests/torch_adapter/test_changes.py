"""Changes to a wrapped model during training: added or unfrozen parameters, other dtypes, and a caught backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib_torch as ct
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib_torch import DataParallel, DistributedOptimizer

from .oracle import assert_close, assert_same_everywhere, batch, gradients_of, loss_of, mine, model, parameters_of

TINY = 1e-4


class Added(nn.Module):
    """A layer with a low-rank branch, as LoRA adds it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.low, self.high = (
            layer,
            nn.Linear(8, 2, bias=False).double(),
            nn.Linear(2, 8, bias=False).double(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.high(self.low(x))
        return out


def change(network: nn.Sequential, how: str, seed: int) -> None:
    torch.manual_seed(seed)
    if how == "thawed":
        network[2].requires_grad_(True)
    elif how == "head":
        network[4] = nn.Linear(8, 3).double()
    elif how == "assign":
        state = {name: value + seed for name, value in network.state_dict().items()}
        network.load_state_dict(state, assign=True)
    elif how == "weight norm":
        torch.nn.utils.parametrizations.weight_norm(network[2])
    elif how == "adapter":
        network[2].requires_grad_(False)
        network[2] = Added(network[2])
    elif how == "converted":
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        network.to(torch.float32).to(torch.float64)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    elif how == "frozen":
        network[2].requires_grad_(False)


@pytest.mark.parametrize("how", ["thawed", "head", "assign", "weight norm", "adapter", "converted", "frozen"])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_module_reduces_parameters_added_later(comm: Any, how: str, op: Any) -> None:
    """Regression: DataParallel silently did not reduce parameters that were added after wrapping."""
    network, alone = model(), model()
    if how == "thawed":
        network[2].requires_grad_(False)
        alone[2].requires_grad_(False)
    called = DataParallel(network, bucket_cap_mib=TINY, op=op)
    for own in (network, alone):
        seed = comm.rank if own is network else 0  # rank 0's values count
        plain = torch.optim.SGD(own.parameters(), lr=0.1)
        scale = 1 if own is network or op == "mean" else comm.size
        for step in range(5):
            if step == 2:
                change(own, how, seed)
                plain = torch.optim.SGD(own.parameters(), lr=0.1)
            if step != 4:  # the last step adds to reduced gradients
                plain.zero_grad()
            data = mine(comm, batch(comm, step)) if own is network else batch(comm, step)
            (scale * loss_of(called if own is network else own, data)).backward()
            for parameter in own.parameters():  # out of place, as some clipping code does
                parameter.grad = None if parameter.grad is None else parameter.grad.clamp(-0.1, 0.1)
            plain.step()
    # Ranks' own sums round to float32 and back, and some round in the other direction: 2**-24, relative.
    assert_close(parameters_of(network), parameters_of(alone), 1e-6 if how == "converted" else 1e-11)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.parametrize("how", ["thawed", "group", "adasum"])
def test_an_optimizer_reduces_parameters_unfrozen_later(comm: Any, how: str) -> None:
    """Regression: unfrozen parameters were refused, or with Adasum left out, so that ranks diverged."""
    network, alone = model(), model()
    for own in (network, alone):
        own[2].requires_grad_(False)
        groups: Any = list(own.parameters())
        if how == "group":
            groups = [*own[0].parameters(), *own[4].parameters()]
        plain: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if own is network:
            plain = DistributedOptimizer(
                plain, own.named_parameters(), bucket_cap_mib=TINY, op=ct.Adasum if how == "adasum" else ct.Average
            )
        for step in range(4):
            if step == 1:
                own[2].requires_grad_(True)
                if how == "group":
                    plain.param_groups[0]["params"] += list(own[2].parameters())
            plain.zero_grad()
            equal = batch(comm, 0)  # Adasum of equal steps is one such step
            data = equal if how == "adasum" else mine(comm, batch(comm, step)) if own is network else batch(comm, step)
            loss_of(own, data).backward()
            plain.step()
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_manually_assigned_gradients_need_synchronize(comm: Any) -> None:
    """Without synchronize() a step raises. Regression: ranks diverged if gradients came from torch.autograd.grad."""
    for op in ("mean", "sum"):
        network, alone = model(), model()
        called = DataParallel(network, op=op)
        plain, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (network, alone))

        def by_hand(own: nn.Module, data: Any, scale: int = 1, each: Any = None) -> None:
            each.zero_grad()
            result = torch.autograd.grad(scale * loss_of(own, data), list(each.param_groups[0]["params"]))
            for parameter, gradient in zip(each.param_groups[0]["params"], result, strict=True):
                parameter.grad = gradient

        for step in range(3):
            by_hand(called, mine(comm, batch(comm, step)), each=plain)
            if step == 0:
                with pytest.raises(UsageError, match=r"4\.bias.*by hand|0\.weight.*by hand"):
                    plain.step()
            called.synchronize()
            plain.step()
            plain.step()  # a second step on reduced gradients is correct
            by_hand(alone, batch(comm, step), comm.size if op == "sum" else 1, each=other)
            other.step()
            other.step()
        assert_close(parameters_of(network), parameters_of(alone), 1e-11)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("wrapper", ["optimizer", "closure", "module"])
def test_a_gradient_assigned_after_a_backward_is_reduced(comm: Any, wrapper: str, op: Any) -> None:
    """Regression: it stayed local if a backward had reduced others in the same step, and ranks diverged."""
    network, alone = model(), model()
    factor = comm.size if op == "sum" else 1
    plain, other = torch.optim.SGD(network.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
    called: Any = DataParallel(network, op=op) if wrapper == "module" else network
    if wrapper != "module":
        DistributedOptimizer(plain, network.named_parameters(), op=op)
    for step in range(3):
        for own, optimizer, rows in ((called, plain, mine(comm, batch(comm, step))), (alone, other, batch(comm, step))):
            layers: Any = next(iter(own.children())) if wrapper == "module" and own is called else own
            assert isinstance(layers, nn.Sequential)
            scale = 1 if own is called else factor

            def closure(
                optimizer: Any = optimizer, layers: Any = layers, rows: Any = rows, scale: int = scale
            ) -> Tensor:
                optimizer.zero_grad()
                aside = scale * layers[4](rows[1].repeat(1, 3)[:, :8]).square().mean()
                gradients = torch.autograd.grad(aside, list(layers[4].parameters()))
                loss: Tensor = scale * layers[:4](rows[0]).square().mean()
                loss.backward()
                for parameter, gradient in zip(layers[4].parameters(), gradients, strict=True):
                    parameter.grad = gradient
                return loss

            if wrapper == "closure":
                optimizer.step(closure)
                continue
            closure()
            if optimizer is plain and wrapper == "module":
                with pytest.raises(UsageError, match=r"4\.(weight|bias) was put into \.grad by hand after backward"):
                    optimizer.step()
                called.synchronize()
            optimizer.step()
    assert_close(parameters_of(network), parameters_of(alone), 1e-11)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_a_gradient_assigned_on_one_rank_only_is_refused(comm: Any) -> None:
    """Regression: the others did not reduce it. Now all ranks raise an error, and continue with the next step."""
    network = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        network[:4](mine(comm, batch(comm, step))[0]).square().mean().backward()
        if comm.rank == 1:
            network[4].bias.grad = torch.ones(3, dtype=torch.float64)
            with pytest.raises(
                MismatchError, match=r"4\.bias was put into .* on ranks \[1\] after .*, but not on ranks \[0"
            ):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(
                MismatchError, match=r"4\.bias was put into .* on ranks \[1\] after .*, but not on ranks \[0"
            ):
                loss_of(network, mine(comm, batch(comm, step))).backward()
    optimizer.zero_grad()
    loss_of(network, mine(comm, batch(comm))).backward()
    assert_same_everywhere(comm, gradients_of(network))


@pytest.mark.ranks(min=2)
def test_a_step_with_gradients_accumulated_under_no_sync(comm: Any) -> None:
    """Regression: with DataParallel each rank silently stepped alone. An intended local step runs under no_sync."""
    network, alone, head = model(), model(), nn.Linear(3, 1).double()
    called = DataParallel(network)
    plain, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (network, alone))
    beside = torch.optim.SGD(head.parameters(), lr=0.1)
    with called.no_sync():
        head(called(mine(comm, batch(comm))[0])).mean().backward()
    beside.step()
    for parameter in network.parameters():
        parameter.grad = None  # discarded, which nothing notices
    plain.step()
    with called.no_sync():
        loss_of(called, mine(comm, batch(comm))).backward()
    with pytest.raises(UsageError, match=r"0\.weight was accumulated under no_sync"):
        plain.step()
    called.synchronize()
    plain.step()
    loss_of(alone, batch(comm)).backward()
    other.step()
    assert_close(parameters_of(network), parameters_of(alone), 1e-11)
    plain.zero_grad()
    with called.no_sync():
        loss_of(called, mine(comm, batch(comm, 1))).backward()
        plain.step()  # an explicitly local step
    plain.zero_grad()
    loss_of(called, mine(comm, batch(comm, 1))).backward()
    plain.step()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
@pytest.mark.parametrize("first", ["hook", "wrapper"])
def test_a_step_within_backward_is_refused(comm: Any, wrapper: str, first: str) -> None:
    """Regression: a hook that steps each parameter ran before the reduction, and ranks diverged."""
    network = nn.Linear(6, 3, bias=False).double()  # the only parameter: only its own step reveals the problem
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in network.parameters()}

    def step(parameter: Any) -> None:
        own[parameter].step()
        parameter.grad = None

    def hook() -> list[Any]:
        return [p.register_post_accumulate_grad_hook(step) for p in network.parameters()]

    hooks = hook() if first == "hook" else []
    called: Any = network
    if wrapper == "module":
        called = DataParallel(network)
    else:
        distributed = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters())
    hooks = hooks or hook()
    local = nn.Linear(2, 2)
    beside = torch.optim.SGD(local.parameters(), lr=0.1)
    local(torch.ones(1, 2)).sum().backward()
    beside.step()  # of another model
    before = parameters_of(network)
    with pytest.raises(UsageError, match=r"within backward, for example in a hook of weight"):
        loss_of(called, mine(comm, batch(comm))).backward()
    assert_close(parameters_of(network), before, 0)
    for one in hooks:
        one.remove()
    if wrapper == "optimizer":
        distributed.zero_grad()
    network.zero_grad()
    loss_of(called, mine(comm, batch(comm))).backward()
    assert_same_everywhere(comm, gradients_of(network))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
def test_ranks_that_add_different_parameters_are_refused(comm: Any, wrapper: str) -> None:
    network = model()
    network[2].requires_grad_(False)
    plain: Any = torch.optim.SGD(network.parameters(), lr=0.1)
    called: Any = network
    if wrapper == "optimizer":
        plain = DistributedOptimizer(plain)
    else:
        called = DataParallel(network)
    if comm.rank == 0:
        network[2].requires_grad_(True)
    with pytest.raises(CommlibError):
        plain.zero_grad()
        loss_of(called, mine(comm, batch(comm))).backward()
        plain.step()
        comm.barrier()
    comm.barrier()


class Kinds(nn.Module):
    """Parameters of every dtype that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def build(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype))

        self.complex128, self.complex64 = build(3, 4, dtype=torch.complex128), build(5, dtype=torch.complex64)
        self.number, self.nothing = build(dtype=torch.complex64), nn.Parameter(torch.empty(0, 3))
        self.doubles, self.halves = nn.Parameter(torch.ones(6).double()), nn.Parameter(torch.ones(4).half())

    def forward(self, x: float) -> Tensor:
        return torch.stack([(p * x).abs().square().sum().double() for p in self.parameters()]).sum()


@pytest.mark.parametrize("compression", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_complex_gradients_can_be_compressed(comm: Any, compression: str, predivide: float) -> None:
    """Regression: the cast of complex gradients failed. They travel as pairs of real numbers, each cast."""
    network, alone = Kinds(), Kinds()
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.01),
        network.named_parameters(),
        compression=compression,
        gradient_predivide_factor=predivide,
    )
    for step in range(3):
        optimizer.zero_grad()
        network(1.0 + comm.rank + step).backward()
        alone.zero_grad()
        torch.stack([alone(1.0 + rank + step) for rank in range(comm.size)]).mean().backward()
        for got, expected in zip(gradients_of(network), gradients_of(alone), strict=True):
            # bfloat16 has 8 bits: an error of 2**-9 in each direction.
            torch.testing.assert_close(got, expected, rtol=0.0, atol=0.01 * (_largest(expected) + 1e-9))
        assert_same_everywhere(comm, [None if g is None else torch.view_as_real(g) if g.is_complex() else g
                                      for g in gradients_of(network)])  # fmt: skip


def _largest(gradient: Tensor | None) -> float:
    return float(gradient.abs().max()) if gradient is not None and gradient.numel() else 0.0


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_dtype_changed_after_wrapping_is_refused(comm: Any, wrapper: str, compression: str) -> None:
    """Regression: torch raised an error about an assignment, or with a cast digits were silently lost."""
    network = model(dtype=torch.float32)
    called: Any = network
    if wrapper == "optimizer":
        wrapped: Any = DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters(), compression=compression
        )
    else:
        wrapped = called = DataParallel(network, compression=compression)
    called.double()
    with pytest.raises(UsageError, match=r"4\.bias is torch.float64 .* was torch.float32 .* before you wrap the model"):
        loss_of(called, mine(comm, batch(comm))).backward()
    called.float()
    network.zero_grad()
    if wrapper == "optimizer":
        wrapped.zero_grad()
    loss_of(called, mine(comm, batch(comm, dtype=torch.float32))).backward()
    alone = model(dtype=torch.float32)
    loss_of(alone, batch(comm, dtype=torch.float32)).backward()
    assert_close(gradients_of(network), gradients_of(alone), 2e-2 if compression == "bf16" else 1e-6)


class Fuse(torch.autograd.Function):
    """Raises in backward while it is lit."""

    lit = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fuse.lit:
            raise ArithmeticError("the fuse blew")
        return gradient


class Fused(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            x = layer(Fuse.apply(x) if number == 4 else x)
        return x


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wrapper", ["optimizer", "module", "passes", "no_sync", "int8"])
def test_a_caught_backward_is_discarded_by_all_ranks(comm: Any, wrapper: str, overlap: bool, who: str) -> None:
    """Regression: after zero_grad() the next backward was refused, or other ranks continued with partial gradients."""
    network = Fused(*model())
    plain: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    called: Any = network
    if wrapper == "module":
        called = DataParallel(network, bucket_cap_mib=TINY, overlap=overlap)
    else:
        plain = DistributedOptimizer(
            plain,
            bucket_cap_mib=TINY,
            overlap=overlap,
            backward_passes_per_step=2 if wrapper == "passes" else 1,
            compression="int8" if wrapper == "int8" else "none",
        )
    caught = 0
    for step in range(4):
        plain.zero_grad()
        if wrapper in ("passes", "no_sync"):  # preceded by a pass that only accumulates
            data = batch(comm, 10 + step)
            if wrapper == "no_sync":
                with plain.no_sync():
                    loss_of(called, mine(comm, data)).backward()
            else:
                loss_of(called, mine(comm, data)).backward()
        Fuse.lit = step == 1 and (who == "all" or comm.rank == comm.size - 1)
        try:
            loss_of(called, mine(comm, batch(comm, step))).backward(retain_graph=True)
        except (ArithmeticError, MismatchError) as error:
            assert isinstance(error, ArithmeticError) or f"backward of ranks [{comm.size - 1}]" in str(error)
            caught += 1
            continue
        finally:
            Fuse.lit = False
        plain.step()
    assert caught == 1
    assert_same_everywhere(comm, parameters_of(network))
    expected = model()
    other = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2, 3):
        other.zero_grad()
        for number in [10 + step] * (wrapper in ("passes", "no_sync")) + [step]:
            loss_of(expected, batch(comm, number)).backward()
        other.step()
    assert_close(parameters_of(network), parameters_of(expected), 0.02 if wrapper == "int8" else 1e-11)
