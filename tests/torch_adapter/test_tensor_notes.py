"""Marks of divided parameters survive copies and loading; without them, parts were taken for whole weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import normal_ as normal_before
from torch.nn.utils import parametrizations, prune

from commlib import Mesh
from commlib.errors import UsageError
from commlib.expert.experts import Experts
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib_torch import DataParallel, DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from commlib_torch.expert import MoE
from commlib_torch.tensor import gather_state_dict, parallelize, shard_of

PLAN: Any = {"0": Column(), "2": Row()}


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def assign(model: nn.Module) -> nn.Module:
    model.load_state_dict(whole().state_dict(), assign=True)
    return model


def overwrite(model: nn.Module) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    return model.float().double()


def swap(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    return model.float().double()


def swap_loading(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.load_state_dict(whole().state_dict())
    return model


def replace(model: Any) -> Any:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return model


def empty(model: nn.Module) -> nn.Module:
    state = gather_state_dict(model)
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "assign": assign,
    "overwrite": overwrite,
    "swap": swap,
    "swap when loading": swap_loading,
    "replace": replace,
    "to_empty": empty,
    "deepcopy": copy.deepcopy,
    "to": lambda model: model.float().double(),
    "all": lambda model: copy.deepcopy(assign(swap(overwrite(copy.deepcopy(model))))),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("way", WAYS)
def test_a_divided_parameter_keeps_its_mark(comm: Any, way: str) -> None:
    """Regression: `gather_state_dict` wrote parts as if they were whole, and norms counted one rank's parts."""
    model = WAYS[way](parallelize(whole(), comm, PLAN))
    divided = [name for name, parameter in model.named_parameters() if shard_of(parameter) is not None]
    assert divided == ["0.weight", "0.bias", "2.weight"]
    expected = whole() if way != "to" and way != "overwrite" and way != "swap" and way != "all" else whole().float()
    for name, value in gather_state_dict(model).items():
        torch.testing.assert_close(value.double(), expected.state_dict()[name].double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("way", ["overwrite", "swap", "deepcopy", "to_empty"])
def test_experts_keep_their_marks(comm: Any, way: str) -> None:
    model = WAYS[way](MoE(6, Experts(2 * comm.size, hidden=4), comm).double())
    shapes = {name: tuple(value.shape) for name, value in gather_state_dict(model).items()}
    assert shapes["experts.up.weight"] == (2 * comm.size, 4, 6)
    assert all(shard_of(parameter) is not None for parameter in model.experts.parameters())


def test_a_whole_weight_in_place_of_a_part_is_refused(comm: Any) -> None:
    model: Any = parallelize(whole(), comm, PLAN)
    if comm.size > 1:
        with pytest.raises(UsageError, match=r"weight .* now has shape \[8, 6\], expected"):
            model[0].weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "look",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: nn.utils.spectral_norm(layer),
        lambda layer: parametrizations.weight_norm(layer),
    ],
)
def test_operations_on_whole_weights_are_refused_on_parts(comm: Any, look: Callable[[Any], object]) -> None:
    """Regression: pruning removed the smallest half of each rank's part."""
    model: Any = parallelize(whole(), comm, PLAN)
    with pytest.raises(UsageError, match="before the layer is sharded"):
        look(model[0])


@pytest.mark.parametrize(
    ("make", "made_of"),
    [
        (lambda layer: nn.utils.weight_norm(layer), "weight_g, weight_v"),
        (lambda layer: nn.utils.spectral_norm(layer), "weight_orig"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_derived_weight_is_refused_by_name(comm: Any, make: Any, made_of: str) -> None:
    """Regression: it raised AttributeError."""
    model: Any = whole()
    make(model[0])
    with pytest.raises(UsageError, match=rf"plan: 0: its weight is not a parameter, but computed from .*{made_of}"):
        parallelize(model, comm, PLAN)


class Everything(nn.Module):
    """A model with one of each layer that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(10, 8, padding_idx=9), nn.Embedding(10, 8, padding_idx=3)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 10)
        self.attention, self.keys = nn.MultiheadAttention(8, 4), nn.MultiheadAttention(8, 4, kdim=6, vdim=5)
        self.wide, self.narrow = nn.Conv1d(8, 12, 3), nn.Conv2d(12, 8, 3)
        self.norm = nn.LayerNorm(8)


EVERYTHING: Any = {
    "words": Vocabulary(), "features": Column(), "up": Column(), "down": Row(), "head": Vocabulary(),
    "attention": Column(), "keys": Column(), "wide": Column(), "narrow": Row(),
}  # fmt: skip


def reset(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, name):
                vars(type(module)).get(name, getattr(type(module), name))(module)


def initialized(name: str) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                getattr(nn.init, name)(parameter)

    return run


def taken(model: nn.Module) -> None:
    """Initialise weights in place, as Hugging Face's models do."""
    for parameter in model.parameters():
        normal_before(parameter, std=0.1)


def data(model: nn.Module) -> None:
    """Initialise weights through `.data`, as published code does."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.xavier_normal_(parameter.data)
            nn.init.kaiming_uniform_(parameter.detach())


WAYS_TO_BEGIN: dict[str, Callable[[nn.Module], None]] = {
    "reset_parameters": reset,
    "taken before": taken,
    "data": data,
    **{
        name: initialized(name)
        for name in (
            "uniform_", "normal_", "trunc_normal_", "eye_", "xavier_uniform_", "kaiming_normal_", "orthogonal_",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS_TO_BEGIN)
def test_initialisation_draws_the_whole(comm: Any, way: str) -> None:
    """Regression: all ranks drew the same numbers for their parts, scaled for the sizes of the parts."""
    torch.manual_seed(0)
    plain = Everything()
    model = parallelize(copy.deepcopy(plain), comm, EVERYTHING)
    after = []
    for one in (plain, model):
        torch.manual_seed(5)
        WAYS_TO_BEGIN[way](one)
        after.append(torch.rand(()))
    assert after[0] == after[1]
    for name, value in gather_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.ranks(min=2)
def test_a_slice_of_a_divided_weight_is_not_initialised(comm: Any) -> None:
    """Regression: each rank initialised its slice as if it were that of the whole."""
    model: Any = parallelize(whole(), comm, PLAN)
    for piece in (model[0].weight.data[:1], model[0].weight.data.T):
        with pytest.raises(UsageError, match="is a view of a sharded parameter"):
            nn.init.normal_(piece)


def test_files_refuse_parts(comm: Any, tmp_path: Any) -> None:
    """Regression: safetensors, and so save_pretrained, silently wrote one rank's parts; torch.save gave no warning."""
    files = pytest.importorskip("safetensors.torch")
    model = parallelize(whole(), comm, PLAN)
    path = tmp_path / f"{comm.rank}.safetensors"
    if comm.size > 1:
        for state in (model.state_dict(), dict(model.named_parameters())):
            with pytest.raises(UsageError, match=r"0.weight on rank \d of .* shard of \[8, 6\].*gather_state_dict"):
                files.save_file(state, path)
        with pytest.warns(UserWarning, match=f"rank {comm.rank} of .* saves its own shards"):
            torch.save(model.state_dict(), path)
    files.save_file(gather_state_dict(model), path)
    for name, value in files.load_file(path).items():
        assert torch.equal(value, whole().state_dict()[name])


def test_different_parts_are_never_averaged(comm: Any) -> None:
    """Regression: without mesh= different ranks' parts were silently averaged; broadcast replaced them by rank 0's."""
    model = parallelize(whole(), comm, PLAN)
    if comm.size == 1:
        return
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for call in (
        lambda: DistributedOptimizer(optimizer, model.named_parameters()),
        lambda: DistributedOptimizer(optimizer, model.named_parameters(), op="adasum"),
        lambda: DistributedOptimizer(optimizer, model.named_parameters(), ranks=comm),
        lambda: DataParallel(model),
        lambda: broadcast_parameters(model.state_dict(), 0),
        lambda: broadcast_parameters(model.named_parameters(), ranks=comm),
        lambda: broadcast_optimizer_state(optimizer, 0),
    ):
        with pytest.raises(UsageError, match=r"but ranks \[\d.*have other shards.*mesh"):
            call()


def test_equal_parts_are_averaged(comm: Any) -> None:
    mesh = Mesh(dp=-1, tp=2 if comm.size % 2 == 0 else 1)
    model = parallelize(whole(), mesh["tp"], PLAN)
    broadcast_parameters(model.state_dict(), ranks=mesh["dp"])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), mesh=mesh)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    mesh.close()
