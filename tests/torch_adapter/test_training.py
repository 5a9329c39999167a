"""Training on P ranks matches one process that has the whole batch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commlib_torch
from commlib_torch import DataParallel, DistributedOptimizer

from .oracle import FEATURES, ROWS, assert_close, assert_same_everywhere, batch, loss_of, mine, model, parameters_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}
# Sums are in another order: a few units in the last place, amplified by the steps after it (Adam divides by
# the root of small numbers).
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3}
TINY = 1e-4  # MiB: several buckets even for a small model


def train_alone(comm: Any, make: Any, dtype: torch.dtype, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    network = model(dtype=dtype)
    optimizer = make(network.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, batch(comm, step, dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parameters_of(network)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("cap", "overlap"), [(TINY, True), (TINY, False), (25, None)])
def test_distributed_optimizer(comm: Any, kind: str, dtype: torch.dtype, cap: float, overlap: bool | None) -> None:
    expected_losses, expected = train_alone(comm, OPTIMIZERS[kind], dtype, 20)
    network = model(dtype=dtype)
    optimizer: Any = DistributedOptimizer(
        OPTIMIZERS[kind](network.parameters()),
        network.named_parameters(),
        bucket_cap_mib=cap,
        first_bucket_mib=min(cap, 1),
        overlap=overlap,
    )
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = loss_of(network, mine(comm, batch(comm, step, dtype)))
        loss.backward()
        optimizer.step()
        losses.append(commlib_torch.all_reduce(loss, "mean").item())
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE[dtype])
    assert_close(parameters_of(network), expected, TOLERANCE[dtype])
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_data_parallel(comm: Any, kind: str) -> None:
    expected_losses, expected = train_alone(comm, OPTIMIZERS[kind], torch.float64, 20)
    network = model(seed=0 if comm.rank == 0 else 99)  # all ranks use rank 0's parameters
    wrapped = DataParallel(network, bucket_cap_mib=TINY, overlap=True)
    optimizer = OPTIMIZERS[kind](wrapped.parameters())
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = loss_of(wrapped, mine(comm, batch(comm, step)))
        loss.backward()
        optimizer.step()
        losses.append(commlib_torch.all_reduce(loss, "mean").item())
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    assert_close(parameters_of(network), expected, 1e-10)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_without_reduction_ranks_would_differ(comm: Any) -> None:
    """The tests above can fail: the data of the ranks differs enough."""
    network = model()
    loss_of(network, mine(comm, batch(comm))).backward()
    alone = model()
    loss_of(alone, batch(comm)).backward()
    first, reference = next(network.parameters()).grad, next(alone.parameters()).grad
    assert first is not None and reference is not None
    assert not torch.allclose(first, reference, rtol=1e-3)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_final_when_backward_returns(comm: Any, overlap: bool) -> None:
    alone = model()
    loss_of(alone, batch(comm)).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
    network = model()
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=1.0), first_bucket_mib=TINY, bucket_cap_mib=TINY, overlap=overlap
    )
    loss_of(network, mine(comm, batch(comm))).backward()
    assert nn.utils.clip_grad_norm_(network.parameters(), 0.05).item() == pytest.approx(norm.item(), rel=1e-12)
    gradients: list[Any] = [parameter.grad for parameter in network.parameters()]
    assert_close(gradients, [parameter.grad for parameter in alone.parameters()])
    before = parameters_of(network)
    optimizer.step()
    clipped = [old - gradient for old, gradient in zip(before, gradients, strict=True)]
    assert_close(parameters_of(network), clipped, 0)  # step() reduced nothing a second time
    if comm.size > 1:
        assert optimizer.statistics.reductions == 1
        assert (optimizer.statistics.early_launches > 0) == overlap
        assert optimizer.exposed_seconds > 0


def test_gradients_are_in_symmetric_memory_and_are_not_copied(comm: Any) -> None:
    """With zero_grad(set_to_none=False) gradients accumulate in the memory in which they are reduced."""
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    alone = model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    addresses = []
    for step in range(3):
        for someone in (optimizer, reference):
            someone.zero_grad(set_to_none=False)
        loss_of(network, mine(comm, batch(comm, step))).backward()
        loss_of(alone, batch(comm, step)).backward()
        addresses.append([parameter.grad.data_ptr() for parameter in network.parameters()])  # type: ignore[union-attr]
        optimizer.step()
        reference.step()
    assert addresses[0] == addresses[1] == addresses[2]
    assert_close(parameters_of(network), parameters_of(alone))


@pytest.mark.parametrize("clear", ["optimizer", "module", "zero", "replace"])
def test_every_way_to_clear_gradients(comm: Any, clear: str) -> None:
    def run(network: nn.Module, optimizer: torch.optim.Optimizer, rows: Callable[[Any], Any]) -> None:
        for step in range(3):
            loss_of(network, rows(batch(comm, step))).backward()
            if clear == "replace":  # user code rescales, and assigns new tensors
                for parameter in network.parameters():
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad * 0.5
            optimizer.step()
            if clear == "module":
                network.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=clear != "zero")

    network, alone = model(), model()
    run(network, DistributedOptimizer(torch.optim.Adam(network.parameters())), lambda data: mine(comm, data))
    run(alone, torch.optim.Adam(alone.parameters()), lambda data: data)
    assert_close(parameters_of(network), parameters_of(alone), 1e-10)


def test_several_dtypes(comm: Any) -> None:
    """One model has float32, bfloat16 and float64: each dtype is reduced in its own buckets."""

    def make() -> nn.ModuleList:
        return nn.ModuleList(
            [model(0, torch.float32), model(1, torch.bfloat16), model(2, torch.float64), model(3, torch.float32)]
        )

    def run(network: nn.ModuleList, optimizer: torch.optim.Optimizer, rows: Callable[[Any], Any]) -> None:
        data = rows(batch(comm))
        total = torch.zeros((), dtype=torch.float64)
        for part in network:
            dtype = next(part.parameters()).dtype
            total = total + loss_of(part, (data[0].to(dtype), data[1].to(dtype))).double()
        total.backward()
        optimizer.step()

    network, alone = make(), make()
    run(network, DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.5)), lambda data: mine(comm, data))
    run(alone, torch.optim.SGD(alone.parameters(), lr=0.5), lambda data: data)
    for part, reference, tolerance in zip(network, alone, [1e-5, 3e-2, 1e-12, 1e-5], strict=True):
        assert_close(parameters_of(part), parameters_of(reference), tolerance)
    assert_same_everywhere(comm, parameters_of(network))


def test_complex_and_scalar_and_empty_parameters(comm: Any) -> None:
    def make() -> nn.ParameterDict:
        return nn.ParameterDict(
            {
                "z": torch.arange(6, dtype=torch.float64).reshape(2, 3) * (1 + 0.5j),
                "unit": torch.tensor(1 - 2j, dtype=torch.complex128),
                "scale": torch.tensor(0.5, dtype=torch.float64),
                "empty": torch.empty(0, 3, dtype=torch.float64),
            }
        )

    def run(network: nn.ParameterDict, optimizer: torch.optim.Optimizer, rows: Callable[[Any], Any]) -> None:
        for step in range(3):
            data = rows(batch(comm, step))[0].to(torch.complex128)
            value = (data @ network["z"].reshape(6, 1) * network["unit"]).abs() * network["scale"]
            loss = value.mean() + network["empty"].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    network, alone = make(), make()
    run(network, DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1)), lambda data: mine(comm, data))
    run(alone, torch.optim.SGD(alone.parameters(), lr=0.1), lambda data: data)
    assert_close(parameters_of(network), parameters_of(alone))


def test_channels_last_parameters(comm: Any) -> None:
    """Gradients of parameters with other strides are packed into the bucket."""

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Conv2d(2, 4, 3).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def run(network: nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> None:
        for _ in range(2):
            images = torch.arange(comm.size * 2 * 2 * 25.0, dtype=torch.float64).reshape(-1, 2, 5, 5).sin()[rows]
            optimizer.zero_grad()
            network(images.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()

    network, alone = make(), make()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    run(network, optimizer, slice(2 * comm.rank, 2 * comm.rank + 2))
    run(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), slice(None))
    assert_close(parameters_of(network), parameters_of(alone))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph_and_grad_mode(comm: Any) -> None:
    network, alone = model(), model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for someone, data in ((network, mine(comm, batch(comm))), (alone, batch(comm))):
        loss = loss_of(someone, data)
        with torch.no_grad():
            loss.backward(retain_graph=True)
        with torch.no_grad():
            someone.zero_grad()
        loss.backward(create_graph=True)
    assert_close([p.grad.detach() for p in network.parameters()], [p.grad.detach() for p in alone.parameters()])  # type: ignore[union-attr]
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_gradients_does_not_survive_a_reduction(comm: Any) -> None:
    """Regression: a penalty on .grad silently had no effect, unlike in one process."""
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"create_graph=True.*have no graph.*torch.autograd.grad"):
        loss_of(network, mine(comm, batch(comm))).backward(create_graph=True)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither an ordinary backward nor one of requested gradients warns
        optimizer.zero_grad()
        loss = loss_of(network, mine(comm, batch(comm)))
        penalty = sum(
            g.square().sum() for g in torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
        )
        (loss + penalty).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_gradients_survives_without_a_reduction(comm: Any) -> None:
    """Regression: a false warning appeared for gradients that kept their graph, or never had one."""
    network, alone, other = model(), model(), model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "backward.create_graph=True.: gradients that are reduced")
        loss_of(other, mine(comm, batch(comm))).backward(create_graph=True)  # of parameters outside of this optimizer
        with optimizer.no_sync():
            for someone in (network, alone):
                loss_of(someone, mine(comm, batch(comm))).backward(create_graph=True)
                torch.stack([p.grad.square().sum() for p in someone.parameters()]).sum().backward()  # type: ignore[union-attr]
        own, theirs = ([p.grad.detach() for p in one.parameters()] for one in (network, alone))  # type: ignore[union-attr]
        assert_close(own, theirs)
        optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in network.parameters()]).sum().backward(create_graph=True)
        optimizer.step()
    lonely: Any = DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), ranks=comm.split(comm.rank))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "backward.create_graph=True.: gradients that are reduced")
        lonely.zero_grad()
        loss_of(other, mine(comm, batch(comm))).backward(create_graph=True)
        lonely.step()
        assert all(parameter.grad.requires_grad for parameter in other.parameters())  # type: ignore[union-attr]


def test_two_optimizers_and_a_loss_through_both(comm: Any) -> None:
    """For a generator and its critic, the order in which backward reaches two reducers does not matter."""

    def run(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], rows: Callable[[Any], Any]) -> list[Any]:
        generator, critic = model(1), nn.Linear(3, 1).double()
        with torch.no_grad():
            for number, parameter in enumerate(critic.parameters()):
                parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float64).reshape(parameter.shape) + number)
        one, two = (wrap(torch.optim.Adam(part.parameters())) for part in (generator, critic))
        for step in range(4):
            inputs, targets = rows(batch(comm, step))
            two.zero_grad()
            (critic(generator(inputs).detach()).square().mean() - critic(targets).mean()).backward()
            two.step()
            one.zero_grad()
            critic(generator(inputs)).square().mean().backward()
            one.step()
        return [*parameters_of(generator), *parameters_of(critic)]

    together = run(DistributedOptimizer, lambda data: mine(comm, data))
    assert_close(together, run(lambda optimizer: optimizer, lambda data: data), 1e-9)
    assert_same_everywhere(comm, together)


def test_two_optimizers_that_backward_reaches_in_another_order_on_each_rank(comm: Any) -> None:
    """With two reducers nothing is launched during backward, as the order would differ among ranks."""

    def make() -> list[nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return [nn.Linear(FEATURES, FEATURES).double() for _ in range(2)]

    def loss(parts: list[nn.Module], rank: int) -> torch.Tensor:
        rows = batch(comm)[0][ROWS * rank : ROWS * (rank + 1)]
        first, second = parts if rank % 2 else parts[::-1]
        return second(torch.tanh(first(rows))).square().mean()  # type: ignore[no-any-return]

    together, alone = make(), make()
    optimizers = [
        DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), bucket_cap_mib=TINY, overlap=True)
        for part in together
    ]
    loss(together, comm.rank).backward()
    torch.stack([loss(alone, rank) for rank in range(comm.size)]).mean().backward()
    for part, reference in zip(together, alone, strict=True):
        assert_close([p.grad for p in part.parameters()], [p.grad for p in reference.parameters()])
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(comm: Any, reentrant: bool) -> None:
    """Re-entrant checkpointing nests backwards: the reduction ends with the outer one."""
    from torch.utils.checkpoint import checkpoint

    def run(network: nn.Sequential, optimizer: torch.optim.Optimizer, rows: Callable[[Any], Any]) -> None:
        for step in range(3):
            inputs, targets = rows(batch(comm, step))
            optimizer.zero_grad()
            inputs.requires_grad_()
            hidden = checkpoint(network[:2], inputs, use_reentrant=reentrant)
            hidden = checkpoint(network[2:4], hidden, use_reentrant=reentrant)
            (network[4](hidden) - targets).square().mean().backward()
            optimizer.step()

    network, alone = model(), model()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network.parameters()), bucket_cap_mib=TINY, overlap=True)
    run(network, optimizer, lambda data: mine(comm, data))
    run(alone, torch.optim.Adam(alone.parameters()), lambda data: data)
    assert_close(parameters_of(network), parameters_of(alone), 1e-10)
    if comm.size > 1:
        assert optimizer.statistics.reductions == 3


@pytest.mark.parametrize("form", ["transposed", "conjugate", "negated", "subclass", "offset"])
def test_gradients_of_any_layout_reach_their_bucket(comm: Any, form: str) -> None:
    """Autograd, hooks and users may produce gradients whose bytes in memory are not their elements in order."""
    dtype = torch.complex64 if form == "conjugate" else torch.float32
    parameter = nn.Parameter(torch.zeros(3, 3, dtype=dtype))
    optimizer: Any = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)])
    values = torch.arange(9.0).reshape(3, 3) + comm.rank
    complex_values = torch.complex(values, -values)
    gradient = {
        "transposed": values.t(),
        "conjugate": complex_values.conj(),
        "negated": complex_values.conj().imag,  # values, as a view with the negative bit
        "subclass": nn.Parameter(values),
        "offset": torch.cat([torch.zeros(1), values.reshape(-1)])[1:].view(3, 3),
    }[form]
    assert form != "negated" or gradient.is_neg()
    parameter.grad = gradient
    optimizer.synchronize()
    mean = torch.arange(9.0).reshape(3, 3) + (comm.size - 1) / 2
    expected = {"transposed": mean.t(), "conjugate": torch.complex(mean, mean)}.get(form, mean)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad.resolve_conj(), expected)


@pytest.mark.ranks(min=2)
def test_predivide_keeps_large_gradients_within_float16(comm: Any) -> None:
    """98304 = 3 x 2^15 exceeds float16, whose largest number is 65504; half of it is exact."""
    large = 98304.0
    results = {}
    for factor in (1.0, 2.0):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer: Any = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            [("w", parameter)],
            compression=commlib_torch.Compression.fp16,
            gradient_predivide_factor=factor,
        )
        (parameter * torch.tensor([large, 8.0, -large])).sum().backward()
        assert parameter.grad is not None
        results[factor] = parameter.grad.tolist()
        optimizer.step()
    assert results[1.0] == [float("inf"), 8, float("-inf")]
    assert results[2.0] == [large, 8, -large]
