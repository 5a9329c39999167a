"""Broadcast of one rank's parameters and optimizer state to all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import MismatchError, UsageError
from commlib.horovod.broadcast import PACK_BYTES
from commlib_torch import DistributedOptimizer, broadcast, broadcast_optimizer_state, broadcast_parameters

from .oracle import assert_close, assert_same_everywhere, batch, loss_of, mine, model, parameters_of


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list", "generator"])
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast_parameters(comm: Any, form: str, root: int) -> None:
    root %= comm.size
    network = model(seed=comm.rank)
    forms: dict[str, Any] = {
        "state_dict": network.state_dict(),
        "named_parameters": network.named_parameters(),
        "list": list(network.parameters()),
        "generator": (parameter for parameter in network.parameters()),
    }
    addresses = [parameter.data_ptr() for parameter in network.parameters()]
    broadcast_parameters(forms[form], root)
    assert_close(parameters_of(network), parameters_of(model(seed=root)), 0)
    assert [parameter.data_ptr() for parameter in network.parameters()] == addresses


def test_every_kind_of_tensor_at_once(comm: Any) -> None:
    def make(rank: int) -> dict[str, Tensor]:
        return {
            "half": torch.full((3,), rank + 0.5, dtype=torch.float16),
            "brain": torch.full((3, 5), rank + 0.5, dtype=torch.bfloat16),
            "flags": torch.tensor([rank % 2 == 0, True]),
            "scalar": torch.tensor(rank),
            "complex": torch.full((2,), rank + 1j),
            "strided": torch.arange(12.0).reshape(3, 4).t() + rank,
            "empty": torch.empty(0, 7),
            "large": torch.full((PACK_BYTES // 4 + 10,), float(rank)),
            "larger, strided": torch.full((2, PACK_BYTES // 4), float(rank)).t(),
            "last": torch.tensor([rank], dtype=torch.uint8),
        }

    tensors = make(comm.rank)
    root = comm.size - 1
    broadcast_parameters(tensors, root)
    for name, expected in make(root).items():
        assert torch.equal(tensors[name], expected), name
        assert tensors[name].stride() == expected.stride()


def test_bad_parameters(comm: Any) -> None:
    with pytest.raises(UsageError, match="step is not a tensor but a int"):
        broadcast_parameters({"step": 3})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"w: .*device meta"):
        broadcast_parameters({"w": torch.empty(1, device="meta")})


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("odd", [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}, {"a": torch.zeros(2).double()}, {}])
def test_ranks_with_different_tensors_are_refused(comm: Any, odd: dict[str, Tensor]) -> None:
    with pytest.raises(MismatchError, match="tensors to broadcast"):
        broadcast_parameters(odd if comm.rank == comm.size - 1 else {"a": torch.zeros(2)})


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.5, lr), amsgrad=True),
    "tensor lr": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr)),
    "groups": lambda p, lr: torch.optim.RMSprop([{"params": p[:2], "lr": lr}, {"params": p[2:]}], lr=0.5, momentum=0.1),
    "lbfgs": lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=3, history_size=2),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),  # has state before the first step
}


def train_locally(optimizer: torch.optim.Optimizer, network: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(network, data)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Convert a state dict to a form that can be compared."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("who", ["root only", "all but root", "all", "none"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_broadcast_optimizer_state(comm: Any, kind: str, who: str) -> None:
    root = comm.size - 1
    network = model(seed=comm.rank)
    optimizer = OPTIMIZERS[kind](list(network.parameters()), 0.01 * (comm.rank + 1))
    stepped = {"root only": comm.rank == root, "all but root": comm.rank != root, "all": True, "none": False}[who]
    if stepped:
        train_locally(optimizer, network, mine(comm, batch(comm)))
    before = plain(optimizer.state_dict())
    weights = parameters_of(network)
    broadcast_optimizer_state(optimizer, root)
    after = plain(optimizer.state_dict())
    assert after == (before if comm.rank == root else after)
    assert comm.all_gather_object(after) == [after] * comm.size
    assert_close(parameters_of(network), weights, 0)  # no step has run
    assert all(parameter.grad is None for parameter in network.parameters()) or stepped
    broadcast_parameters(network.state_dict(), root)
    for step in range(2):  # training continues identically on all ranks
        train_locally(optimizer, network, batch(comm, step))
    assert_same_everywhere(comm, parameters_of(network))


def test_restart_from_a_checkpoint_of_one_rank(comm: Any) -> None:
    """Rank 0 alone loads the checkpoint; training continues as if it had not stopped."""
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network.parameters(), lr=0.05))

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(network, mine(comm, batch(comm, step))).backward()
            optimizer.step()

    train(range(3))
    checkpoint = {"model": {k: v.clone() for k, v in network.state_dict().items()}, "optimizer": optimizer.state_dict()}
    saved = comm.broadcast_object(checkpoint)
    train(range(3, 6))
    expected = parameters_of(network)

    network = model(seed=5 + comm.rank)
    optimizer = DistributedOptimizer(torch.optim.Adam(network.parameters()))
    if comm.rank == 0:
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    broadcast_parameters(network.state_dict())
    broadcast_optimizer_state(optimizer)
    train(range(3, 6))
    assert_close(parameters_of(network), expected, 0)


@pytest.mark.ranks(min=2)
def test_optimizers_with_different_groups_are_refused(comm: Any) -> None:
    network = model()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters[: 3 if comm.rank else 4], lr=0.1)
    with pytest.raises(MismatchError, match="optimizer parameter groups"):
        broadcast_optimizer_state(optimizer)
    assert broadcast(torch.tensor(comm.rank), 1).item() == 1  # communication still works
