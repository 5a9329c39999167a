"""Layers on divided features, between a Column and its Row: batch and group norms, and PReLU."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Sequence
from commlib_torch import SyncBatchNorm, broadcast_parameters, convert_sync_batchnorm
from commlib_torch.tensor import gather_optimizer_state, gather_state_dict, load_optimizer_state, parallelize, shard_of


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Run a whole test in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def images(seed: int = 1) -> Tensor:
    return random(6, 2, 5, 5, seed=seed)


class Block(nn.Module):
    """The block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = nn.Sequential(Block(4, 4), Block(4, 4)), nn.Sequential(Block(4, 7, 2))
        self.average, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.pool(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(torch.flatten(self.average(x), 1))  # type: ignore[no-any-return]


PLAN: Any = {"*.conv1": Column(), "layer*.bn1": Sequence(1), "*.conv2": Row()}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    labels = torch.arange(6) % 3
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images(step)), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def close(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("plan", ["auto", PLAN], ids=["auto", "plan"])
def test_a_resnet_trains_as_in_one_process(comm: Any, plan: Any, kind: str) -> None:
    """Each channel has its own statistics, and each rank some channels; their number is odd here."""
    plain, model = ResNet(), ResNet()
    parallelize(model, comm, plan, example=images() if plan == "auto" else None, report=lambda table: None)
    bn: Any = model.layer2[0].bn1
    assert bn.style == Sequence(1)
    assert bn.weight.shape == bn.running_mean.shape == (bn.sharding.length(comm.rank, comm.size),)
    ours, theirs = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](plain.parameters())
    train(model, ours)
    train(plain, theirs)
    state = gather_state_dict(model)
    close(state, dict(plain.state_dict()))
    close(model.eval()(images(9)), plain.eval()(images(9)))  # with running statistics
    again = ResNet()  # on one rank, and then on each along the other axis
    again.load_state_dict(state)
    moments = gather_optimizer_state(ours, model.named_parameters())
    later = OPTIMIZERS[kind](again.parameters())
    load_optimizer_state(later, again.named_parameters(), moments)
    for other, optimizer in ((model, ours), (again, later), (plain, theirs)):
        train(other, optimizer, 2)
    close(gather_state_dict(model), dict(plain.state_dict()))
    close(dict(again.state_dict()), dict(plain.state_dict()))


@pytest.mark.ranks(min=4, max=4)
def test_state_can_be_loaded_on_another_number_of_ranks(comm: Any) -> None:
    """It moves from two ranks to four, and back."""
    mesh, plain = Mesh(dp=2, tp=2), ResNet()
    two, four = parallelize(ResNet(), mesh["tp"], PLAN), parallelize(ResNet(), comm, PLAN)
    for model in (plain, two):
        train(model, OPTIMIZERS["sgd"](model.parameters()))
    four.load_state_dict(gather_state_dict(two))
    for model in (plain, four):
        train(model, OPTIMIZERS["sgd"](model.parameters()))
    two.load_state_dict(gather_state_dict(four))
    close(dict(gather_state_dict(two)), dict(plain.state_dict()))
    bn: Any = two.layer1[0].bn1
    with torch.no_grad():
        bn.running_mean += mesh.coordinate("dp")
    broadcast_parameters(two.state_dict())
    broadcast_parameters(list(two.named_buffers()))
    close(dict(gather_state_dict(two)), dict(plain.state_dict()))


def between(*layers: nn.Module) -> nn.Sequential:
    """Return conv, layers of 8 channels, conv; a bias before the norm would have a gradient of mere rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 2, bias=False), *layers, nn.Conv2d(8, 2, 2))
    for weight in model.parameters():
        nn.init.normal_(weight)
    return model


NORMS = nn.GroupNorm, nn.InstanceNorm2d
EVERY: dict[str, Any] = {
    "batch": lambda: [nn.BatchNorm2d(8), nn.PReLU(8)],
    "cumulative": lambda: [nn.BatchNorm2d(8, momentum=None), nn.PReLU()],
    "no weights": lambda: [nn.BatchNorm2d(8, affine=False)],
    "no moments": lambda: [nn.BatchNorm2d(8, track_running_stats=False)],
    "nothing": lambda: [nn.BatchNorm2d(8, affine=False, track_running_stats=False)],
    "groups": lambda: [nn.GroupNorm(4, 8), nn.ReLU(inplace=True)],
    "groups alone": lambda: [nn.GroupNorm(4, 8, affine=False)],
    "instances": lambda: [nn.InstanceNorm2d(8, affine=True, track_running_stats=True)],
    "instances alone": lambda: [nn.InstanceNorm2d(8)],
    "dropout": lambda: [nn.BatchNorm2d(8), nn.Dropout2d(0.0), nn.MaxPool2d(2)],
}


@pytest.mark.ranks(max=4)
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("plan", ["auto", "first call"])
def test_each_kind_of_layer(comm: Any, kind: str, plan: str) -> None:
    """`auto` divides each kind; a plan on a divided model is checked at the first call."""
    plain, x = between(*EVERY[kind]()), images()
    model, count = copy.deepcopy(plain), len(plain) - 1
    if comm.size == 3 and kind.startswith("groups"):  # of 4, which stay whole: 3, 3 and 2 channels are no groups
        given: Any = "auto" if plan == "auto" else {"0": Column(), "1": Sequence(1), f"{count}": Row()}
        with pytest.raises(UsageError, match="its 4 groups cannot be split"):
            parallelize(model, comm, given, example=x, report=lambda table: None)
        return
    if plan == "auto":
        parallelize(model, comm, "auto", verify=x, report=lambda table: None)
        assert isinstance(model[0].style, Column)
        assert isinstance(model[count].style, Row)
    else:
        has_more = [at for at in range(1, count) if plain[at].state_dict() or type(plain[at]) in NORMS]
        styles: Any = {"0": Column(), f"{count}": Row(), **{f"{at}": Sequence(1) for at in has_more}}
        parallelize(model, comm, styles)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), 0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    close(gather_state_dict(model), dict(plain.state_dict()))
    close(model.eval()(x), plain.eval()(x))


def test_features_after_linear_layers(comm: Any) -> None:
    """In an MLP with batch norm, the features are the last dimension, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 2))
    model = parallelize(copy.deepcopy(plain), comm, {"0": Column(), "1": Sequence(-1), "3": Sequence(-1), "4": Row()})
    x = random(6, 3)
    close(model(x), plain(x))
    close(model.eval()(x), plain.eval()(x))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("column", "layer", "style", "text"),
    [
        (Column(parts=2), nn.BatchNorm2d(8), Sequence(1), "1 .* 2 fused parts"),
        (Column(), nn.BatchNorm2d(8), Sequence(2), r"1 has weights of dimension 1, and mixes all .*Sequence\(1\)"),
        (Column(), nn.BatchNorm2d(8), Sequence(-1), r"1 .*Sequence\(dim=-1\).*a part of the features"),
        (Column(), nn.BatchNorm2d(8), None, r"1 .*BatchNorm2d.*values for each feature.*give it Sequence\(1\)"),
        (Column(), nn.BatchNorm2d(8, affine=False), None, r"1 .*give it Sequence\(1\)"),
        (Column(), nn.GroupNorm(4, 8, affine=False), None, r"1 .*give it Sequence\(1\)"),
        (Column(), nn.GroupNorm(1, 8), Sequence(1), "1.*: 1 units .* cannot be split"),
        (Column(), nn.GroupNorm(1, 8, affine=False), Sequence(1), "1: 1 units .* cannot be split"),
        (Column(gather=True), nn.BatchNorm2d(8), Sequence(1), "its input is unsharded"),
        (Column(), SyncBatchNorm(8), Sequence(1), "1 is a SyncBatchNorm, but Sequence is for BatchNorm1d"),
        (Column(), nn.LocalResponseNorm(2), Sequence(1), "mixes positions of a sequence"),
    ],
)
def test_mismatched_styles_are_refused(comm: Any, column: Any, layer: nn.Module, style: Any, text: str) -> None:
    """A rank's weights must match its features."""
    model = between(copy.deepcopy(layer).double())
    before = copy.deepcopy(dict(model.state_dict()))
    plan = {"0": column, "2": Row(split=column.gather)} | ({} if style is None else {"1": style})
    with pytest.raises(UsageError, match=f"(?s){text}"):
        parallelize(model, comm, plan, example=images())
    close(dict(model.state_dict()), before)


@pytest.mark.ranks(min=3, max=3)
def test_uneven_units_are_refused(comm: Any) -> None:
    """Of 4 heads with 2 features each, the first of 3 ranks has 4 features; of 8 features, it has 3."""
    plan: Any = {"0": Column(units=4), "1": Sequence(1), "2": Row(units=4)}
    with pytest.raises(UsageError, match=r"by 0\) in 4 units for 3 ranks"):
        parallelize(between(nn.BatchNorm2d(8)), comm, plan, example=images())


class Slim(nn.Module):
    """A model whose forward adds a penalty on a norm's weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.bn, self.down = nn.Conv2d(2, 8, 2), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.bn(self.up(x))) + self.bn.weight.abs().mean()  # type: ignore[no-any-return]


@pytest.mark.ranks(min=2)
def test_weights_with_other_uses_are_not_divided(comm: Any) -> None:
    """The penalty would cover only this rank's channels."""
    plan: Any = {"up": Column(), "bn": Sequence(1), "down": Row()}
    with pytest.raises(UsageError, match="bn's weight is used outside it, so it has this rank's features only"):
        parallelize(Slim(), comm, plan, example=images())
    with pytest.raises(UsageError, match="finds no layer"):
        parallelize(Slim(), comm, "auto", example=images())


@pytest.mark.ranks(min=2)
def test_statistics_keep_their_marks(comm: Any) -> None:
    """The marks survive copies, casts and loading."""
    model = parallelize(between(nn.BatchNorm2d(8)), comm, {"0": Column(), "1": Sequence(1), "2": Row()})
    model(images())
    state = gather_state_dict(model)
    changed: Any
    for changed in (copy.deepcopy(model), copy.deepcopy(model).float().double()):
        assert shard_of(changed[1].running_var) is not None
        close(gather_state_dict(changed), state, 1e-6)
    fresh: Any = parallelize(between(nn.BatchNorm2d(8)), comm, {"0": Column(), "1": Sequence(1), "2": Row()})
    fresh.load_state_dict(state, assign=True)
    close(gather_state_dict(fresh), state)
    with pytest.raises(UsageError, match=r"running_mean on rank .* now has shape \[8\]"):
        fresh[1].running_mean = torch.zeros(8)
    fresh[1].reset_running_stats()
    fresh[1].reset_parameters()
    close(gather_state_dict(fresh)["1.running_var"], torch.ones(8))
    with pytest.raises(UsageError, match="convert it before"):
        convert_sync_batchnorm(fresh)


@pytest.mark.ranks(min=2)
def test_statistics_saved_by_a_rank_are_for_that_rank(comm: Any) -> None:
    """They have the same shape on all ranks."""
    model = parallelize(between(nn.BatchNorm2d(8)), comm, {"0": Column(), "1": Sequence(1), "2": Row()})
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="saves its own shards"):
        torch.save({"1.running_mean": model.state_dict()["1.running_mean"]}, file)
    files = comm.all_gather_object(file.getvalue())
    other = torch.load(io.BytesIO(files[(comm.rank + 1) % comm.size]))
    with pytest.raises(UsageError, match=r"1.running_mean on rank .* the shard of rank"):
        model.load_state_dict(other, strict=False)
    model.load_state_dict(torch.load(io.BytesIO(files[comm.rank])), strict=False)
