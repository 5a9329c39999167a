"""Values that leave a model other than by its return must be whole, as a loss may use them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Replicate, Row
from commlib_torch import tensor as tp
from commlib_torch.tensor import parallelize, verify

pytestmark = pytest.mark.ranks(min=2)
PLAN: Any = {"up": Column(), "down": Row()}
X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1)).double()
SEEN: list[Any] = []


class Model(nn.Module):
    """A pair of layers; a value between them is stored."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(8, 12), nn.Linear(12, 8), keep
        self.register_buffer("running", torch.zeros(3))
        self.aux: Any = None
        self.dict, self.box = dict[str, Any](), SimpleNamespace()
        self.k_cache: Any = None
        self.v_cache = torch.zeros(1).double()

    def forward(self, x: Tensor, to: Any = None) -> Any:
        h = self.up(x).relu()
        self.keep(self if to is None else to, h)
        out: Tensor = self.down(h)
        return out


def build(keep: Callable[[Any, Tensor], Any]) -> Any:
    SEEN.clear()
    torch.manual_seed(0)
    return Model(keep).double()


def warnings_of(comm: Any, call: Callable[[], Any]) -> list[str]:
    """Return rank 0's warnings about a plan."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    messages = [str(one.message) for one in caught if "plan" in str(one.message)]
    assert comm.rank == 0 or not messages
    return messages


def refused(comm: Any, call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    for text in ("kept", "test_tensor_stored_parts.py", *texts):
        assert text in str(error.value)


def closed_over() -> Callable[[Any, Tensor], Any]:
    last = None

    def keep(_: Any, value: Tensor) -> None:
        nonlocal last
        last = value

    return keep


class Slotted:
    __slots__ = ("value",)


SLOTTED = Slotted()

DOORS: dict[str, Callable[[Any, Tensor], Any]] = {
    "attribute": lambda model, value: setattr(model, "aux", value),
    "list": lambda model, value: setattr(model, "aux", [value]),
    "tuple within a dict": lambda model, value: model.dict.update(aux=(value, None)),
    "object": lambda model, value: setattr(model.box, "aux", value),
    "object with slots": lambda model, value: setattr(SLOTTED, "value", value),
    "global": lambda model, value: SEEN.append(value),
    "closure": closed_over(),
    "function": lambda model, value: setattr(model, "aux", lambda: value),
    "buffer": lambda model, value: model.register_buffer("more", value),
}
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "features": lambda h: h,
    "a sum": lambda h: h.sum(-1),
    "a scalar": lambda h: h.square().mean(),
    "a view": lambda h: h[0],
    "unknown": lambda h: torch.fft.fft(h).abs().mean(),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("part", ["features", "a scalar"])
def test_a_stored_part_is_refused_at_each_place(comm: Any, door: str, part: str) -> None:
    model = build(lambda model, h: DOORS[door](model, PARTS[part](h)))
    parallelize(model, comm, PLAN)
    refused(comm, lambda: model(X), "by up")


@pytest.mark.parametrize("part", PARTS)
def test_values_derived_from_a_part_are_refused(comm: Any, part: str) -> None:
    model = build(lambda model, h: setattr(model, "aux", PARTS[part](h)))
    parallelize(model, comm, PLAN)
    refused(comm, lambda: model(X), "up")


@pytest.mark.parametrize("to", [[], {}], ids=["list", "dict"])
def test_a_part_in_an_argument_is_refused(comm: Any, to: Any) -> None:
    def keep(to: Any, h: Tensor) -> None:
        to.append(h) if isinstance(to, list) else to.update(h=h)

    model = build(keep)
    parallelize(model, comm, PLAN)
    refused(comm, lambda: model(X, type(to)()), "by up")


def test_a_part_written_into_an_argument_is_refused(comm: Any) -> None:
    model = build(lambda to, h: to.copy_(h.sum(-1).detach()))
    parallelize(model, comm, PLAN)
    with pytest.raises(UsageError, match="computed from this rank's shard alone"):
        model(X, torch.zeros(4, 5).double())


@pytest.mark.parametrize("layer", ["up", ""], ids=["layer", "block"])
def test_a_hook_that_stores_a_part_is_refused(comm: Any, layer: str) -> None:
    model = nn.Sequential(build(lambda model, h: None).up, nn.ReLU(), nn.Linear(12, 8).double())
    plan: Any = {"0": Column(), "2": Row()}
    seen: list[Tensor] = []
    if layer:
        model[0].register_forward_hook(lambda module, args, out: seen.append(out.mean()))
    else:
        model[1].register_forward_hook(lambda module, args, out: seen.append(out))
    parallelize(model, comm, plan)
    refused(comm, lambda: model(X), "by 0")


class Noted(nn.ReLU):
    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        self.aux = result.square().mean()
        return result


class Doubled(nn.ReLU):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 2


def test_a_pytorch_layer_that_stores_a_part_is_refused(comm: Any) -> None:
    """Values inside of such a layer are checked only if they stay referenced."""
    model = nn.Sequential(nn.Linear(8, 12), Noted(), nn.Linear(12, 8)).double()
    parallelize(model, comm, {"0": Column(), "2": Row()})
    refused(comm, lambda: model(X), "what Noted in 1 makes")
    model = nn.Sequential(nn.Linear(8, 12), Doubled(), nn.Linear(12, 8), Noted()).double()
    parallelize(model, comm, {"0": Column(), "2": Row()})
    assert not warnings_of(comm, lambda: model(X))


@pytest.mark.parametrize("look", ["example", "verify", "auto", "evaluated first", "without gradients"])
def test_each_check_refuses_a_stored_part(comm: Any, look: str) -> None:
    model = build(lambda model, h: setattr(model, "aux", h.mean()))
    if look in ("example", "verify"):
        refused(comm, lambda: parallelize(model, comm, PLAN, **{look: X}), "by up")  # type: ignore[arg-type]
    elif look == "auto":
        with pytest.raises(UsageError, match="kept after a model's call"):
            parallelize(model, comm, "auto", example=X)
    elif look == "evaluated first":
        refused(comm, lambda: parallelize(model, comm, PLAN).eval()(X))
    else:
        with torch.no_grad():
            refused(comm, lambda: parallelize(model, comm, PLAN)(X))


def test_values_stored_only_in_training_are_refused_in_training(comm: Any) -> None:
    model = build(lambda model, h: setattr(model, "aux", h if model.training else None))
    parallelize(model, comm, PLAN)
    model.eval()(X)
    refused(comm, lambda: model.train()(X), "by up")


def test_auto_leaves_the_pair_whole(comm: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = build(lambda model, h: setattr(model, "aux", h)), build(lambda model, h: None)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x))

    plain = Two().double()
    reports: list[str] = []
    model = parallelize(copy.deepcopy(plain), comm, "auto", example=X, report=reports.append)
    assert not hasattr(model.first.up, "style") and hasattr(model.second.up, "style")
    assert torch.allclose(model(X), plain(X), rtol=1e-10)
    assert torch.allclose(model.first.aux, plain.first.aux, rtol=1e-10)


def trained(model: Any, aux: Callable[[], Tensor]) -> dict[str, Tensor]:
    out = model(X)
    (out.square().mean() + aux()).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def test_a_stored_whole_value_trains_as_in_one_process(comm: Any) -> None:
    """The whole may be gathered by the model's own layer, or be a sum over the ranks."""

    def keep(model: Any, h: Tensor) -> None:
        total = h.square().sum()
        model.aux = [model.down(h).mean(), tp.reduce(total, comm) if hasattr(model.up, "style") else total]

    plain = build(keep)
    model = parallelize(copy.deepcopy(plain), comm, PLAN)
    result = warnings_of(comm, lambda: trained(model, lambda: model.aux[0] + model.aux[1]))
    assert not result
    expected = trained(plain, lambda: plain.aux[0] + plain.aux[1])
    shards = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, weight in model.named_parameters():
        own = expected[name]
        if name in shards:
            own = own.chunk(comm.size, shards[name])[comm.rank]
        assert torch.allclose(weight.grad, own, rtol=1e-10, atol=1e-12), name


NOT_KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda model, h: None,
    "a name": lambda model, h: [h.mean(), h],
    "a circle": lambda model, h: _circle(h),
    "what is overwritten": lambda model, h: model.dict.update(aux=h) or model.dict.clear(),
    "a view of it": lambda model, h: h.view(-1).relu(),
    "what is written into zeros": lambda model, h: torch.zeros(4).double().__setitem__(0, h.sum()),
    "a cache that is written": lambda model, h: model.v_cache.__setitem__(0, h.detach().sum()),
    "shapes": lambda model, h: setattr(model, "aux", h.shape[:2]),
    "a constant": lambda model, h: setattr(model, "aux", torch.ones(3)),
    "a cache": lambda model, h: setattr(model, "k_cache", h),
    "a cache's layers": lambda model, h: setattr(model, "aux", KVCache(h)),
    "a cache in a dict": lambda model, h: model.dict.update(cache=[h]),
}


class KVCache:
    def __init__(self, h: Tensor) -> None:
        self.layers = [SimpleNamespace(keys=h)]


def _circle(h: Tensor) -> None:
    result: list[Any] = [h.mean()]
    result.append(result)


@pytest.mark.parametrize("keep", NOT_KEPT)
def test_temporary_values_are_accepted(comm: Any, keep: str) -> None:
    plain = build(NOT_KEPT[keep])
    expected = plain(X)
    model = build(NOT_KEPT[keep])
    parallelize(model, comm, PLAN)
    results: list[Tensor] = []
    assert not warnings_of(comm, lambda: results.append(model(X)))
    assert torch.allclose(results[0], expected, rtol=1e-10)


def test_storing_a_part_can_be_allowed(comm: Any) -> None:
    model = build(lambda model, h: setattr(model, "aux", h.mean()))
    parallelize(model, comm, PLAN, divided_output=True)
    assert not warnings_of(comm, lambda: model(X))


def _without_gradients(model: Any, h: Tensor) -> None:
    with torch.no_grad():
        model.aux = h.square().mean()


WITHOUT_GRADIENT: dict[str, Callable[[Any, Tensor], Any]] = {
    "detached": lambda model, h: setattr(model, "aux", h.detach()),
    "detached before": lambda model, h: setattr(model, "aux", h.detach().mean() * 2),
    "data": lambda model, h: setattr(model, "aux", h.data),
    "without gradients": lambda model, h: _without_gradients(model, h),
    "integers": lambda model, h: setattr(model, "aux", h > 0),
    "a parameter": lambda model, h: SEEN.append(nn.Parameter(h)),
    "an average": lambda model, h: setattr(model, "running", h.detach().flatten(0, 1).mean(0)),
    "an element of a buffer": lambda model, h: model.running.__setitem__(0, h.detach().sum()),
    "an operation that nobody knows": lambda model, h: setattr(model, "aux", torch.fft.fft(h.detach()).abs()),
}


@pytest.mark.parametrize("keep", WITHOUT_GRADIENT)
def test_a_stored_part_without_a_gradient_is_warned_of(comm: Any, keep: str) -> None:
    expected = build(WITHOUT_GRADIENT[keep])(X)
    model = build(WITHOUT_GRADIENT[keep])
    parallelize(model, comm, PLAN)
    results: list[Tensor] = []
    messages = warnings_of(comm, lambda: results.append(model(X)))
    assert torch.allclose(results[0], expected, rtol=1e-10)
    assert len(messages) == (comm.rank == 0)
    assert all("each rank keeps a different value" in one and "test_tensor_stored_parts.py" in one for one in messages)


@pytest.mark.parametrize("number", [lambda h: h.mean().item(), lambda h: h.detach().numpy()], ids=["item", "numpy"])
def test_numbers_computed_from_a_part_are_warned_of(comm: Any, number: Callable[[Tensor], Any]) -> None:
    model = build(lambda model, h: setattr(model, "aux", number(h)))
    parallelize(model, comm, PLAN)
    messages = warnings_of(comm, lambda: model(X))
    assert len(messages) == (comm.rank == 0)
    assert all("Python numbers are read from a tensor" in one for one in messages)


def test_numbers_computed_from_a_whole_are_accepted(comm: Any) -> None:
    model = build(lambda model, h: setattr(model, "aux", model.down(h).mean().item()))
    parallelize(model, comm, PLAN)
    assert not warnings_of(comm, lambda: model(X))


@pytest.mark.parametrize("update", [lambda model, h: model.running.add_(h.detach().mean()),
                                    lambda model, h: model.running[:2].add_(h.detach().mean()),
                                    lambda model, h: setattr(model, "running", 0.9 * model.running + h.mean())],
                         ids=["in place", "a view", "another"])  # fmt: skip
def test_an_average_of_a_part_is_refused(comm: Any, update: Callable[[Any, Tensor], Any]) -> None:
    model = build(update)
    parallelize(model, comm, PLAN)
    with pytest.raises(UsageError, match="this rank's shard"):
        model(X)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_store_nothing(comm: Any, reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
            super().__init__()
            self.inner = build(keep)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    plan: Any = {f"inner.{name}": style for name, style in PLAN.items()}
    x = X.clone().requires_grad_()
    model: Any = parallelize(Outer(lambda model, h: None), comm, plan)
    assert not warnings_of(comm, lambda: model(x).sum().backward())
    model = parallelize(Outer(lambda model, h: setattr(model, "aux", h)), comm, plan)
    refused(comm, lambda: model(x), "by inner.up")


def test_nested_checks_keep_no_references(comm: Any) -> None:
    """`verify` runs the model, whose first call is checked, and so may be a submodel with its own plan."""
    plain = build(lambda model, h: None)
    model = parallelize(copy.deepcopy(plain), comm, PLAN)
    assert not warnings_of(comm, lambda: verify(model, plain, comm, X))
    outer = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), build(lambda model, h: None)).double()
    parallelize(outer[2], comm, PLAN)
    parallelize(outer, comm, {"0": Column(), "1": Row()}, example=X)
    assert not warnings_of(comm, lambda: outer(X))


def test_a_compiled_model_is_checked(comm: Any) -> None:
    model: Any = torch.compile(build(lambda model, h: setattr(model, "aux", h)), backend="eager")
    parallelize(model, comm, PLAN)
    refused(comm, lambda: model(X), "by up")


def test_a_value_combined_with_parts_is_stored_without_its_gradient(comm: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
            super().__init__()
            self.scale, self.up, self.down, self.keep = nn.Linear(8, 1), nn.Linear(8, 12), nn.Linear(12, 8), keep

        def forward(self, x: Tensor) -> Any:
            scale = self.scale(x)
            self.keep(self, scale)
            return self.down(self.up(x) * scale)

    plan: Any = {**PLAN, "scale": Replicate(into_sharded=True)}
    model = parallelize(Scaled(lambda model, scale: setattr(model, "aux", scale.detach())).double(), comm, plan)
    assert not warnings_of(comm, lambda: model(X))
    model = parallelize(Scaled(lambda model, scale: setattr(model, "aux", scale)).double(), comm, plan)
    refused(comm, lambda: model(X), "into_sharded")
