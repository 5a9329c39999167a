"""Graphs, transforms and modes around a divided model match one process, or raise an error with the reason."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Vocabulary
from commlib_torch.tensor import parallelize
from tests.torch_adapter.pairs import Mlp, is_right
from tests.torch_adapter.test_tensor_unknown import build_model, rows

PLAN: Plan = {"up": Column(), "down": Row()}


class Energy(nn.Module):
    """Returns the gradient of its result, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.last(self.down(self.up(x).tanh()).tanh())
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force.square()


def slope(h: Tensor) -> Tensor:
    """Return the gradient of a layer's elements, which have no graph if gradients are disabled."""
    result: Tensor = torch.autograd.grad((h**3).sum(), h, create_graph=True)[0]
    return result


class Saving(nn.Module):
    """A checkpoint that supports only `backward()`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair = nn.Linear(8, 8), Mlp(torch.relu)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.pair, self.first(x), use_reentrant=True)


class Selective(nn.Module):
    """A checkpoint that keeps the results of products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        return self.last(checkpoint(self.inside, x, use_reentrant=False, context_fn=contexts))

    def inside(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh()).tanh()
        return out


@pytest.fixture
def tp(comm: Any) -> Any:
    return commlib.Mesh(tp=comm.size)["tp"]


@pytest.mark.ranks(max=3)
class TestGraphs:
    def test_an_earlier_graph(self, tp: Any) -> None:
        """Regression: an earlier loss in a variable broke later backwards: its graph expected the old shapes."""
        model = build_model(Mlp, torch.tanh)
        plain, heard = copy.deepcopy(model), list[torch.Size]()
        model.up.weight.register_hook(lambda gradient: heard.append(gradient.shape))
        before = model(rows())
        parallelize(model, tp, PLAN, example=rows())
        is_right(plain, model, rows())
        assert heard == [model.up.weight.shape]
        with pytest.raises(UsageError, match=r"(up|down)\.(weight|bias): .*before the layer was sharded"):
            before.sum().backward()

    @pytest.mark.parametrize("way", ["first call", "example", "verify"])
    @pytest.mark.parametrize("kind", ["energy", "slope"])
    def test_gradients_within_a_model(self, tp: Any, kind: str, way: str) -> None:
        """Regression: checks left graphs behind, or disabled gradients that the model needs."""
        model = build_model(lambda _: Energy() if kind == "energy" else Mlp(slope), None)
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            options: dict[str, Any] = {} if way == "first call" else {way: rows()}
            parallelize(model, tp, PLAN, **options)
            is_right(plain, model, rows())

    def test_checkpoints_that_support_only_backward(self, tp: Any) -> None:
        model = build_model(lambda _: Saving(), None)
        plain = copy.deepcopy(model)
        parallelize(model, tp, {"pair.up": Column(), "pair.down": Row()}, verify=rows())
        is_right(plain, model, rows())

    @pytest.mark.parametrize("style", [Row(), Row(split=True), Row(sequence=1)], ids=str)
    def test_selective_checkpoints(self, tp: Any, style: Row) -> None:
        """Regression: they keep results of products, which a Row had summed in place, so that gradients were wrong."""
        model = build_model(lambda _: Selective(), None)
        plain, up = copy.deepcopy(model), Column(gather=style.split)
        parallelize(model, tp, {"up": up, "down": style, "last": Column(sequence=style.sequence, gather=True)})
        x, other = (rows().requires_grad_() for _ in range(2))
        outs = model(x), plain(other)
        for out in outs:
            out.square().sum().backward()
        torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-10)
        torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=1e-10)


@pytest.mark.ranks(min=2, max=3)
class Counted(nn.Module):
    """A model that accepts one number of features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.num_features:
            raise ValueError(f"expected num_features {self.num_features}, got {x.shape[1]}")
        return x


class TestRefused:
    @pytest.mark.parametrize("way", ["grad", "functional_call", "vmap"])
    @pytest.mark.parametrize("checked", [True, False])
    def test_transforms_of_functions(self, tp: Any, way: str, checked: bool) -> None:
        model: Any = parallelize(build_model(Mlp, torch.tanh), tp, PLAN, example=rows() if checked else None)

        def of_weights(weights: Any) -> Any:
            return torch.func.functional_call(model, weights, (rows(),)).sum()

        calls: dict[str, Any] = {
            "grad": lambda: torch.func.grad(lambda x: model(x).sum())(rows()),
            "functional_call": lambda: torch.func.grad(of_weights)(
                {n: p.detach() for n, p in model.named_parameters()}
            ),
            "vmap": lambda: torch.vmap(model)(rows()),
        }
        with pytest.raises(UsageError, match="function transforms"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls[way]()

    def test_inference_mode(self, tp: Any) -> None:
        """Parameters divided in inference mode could not be trained, which only a later step reported."""
        with torch.inference_mode(), pytest.raises(UsageError, match=r"outside"):
            parallelize(build_model(Mlp, torch.tanh), tp, PLAN, example=rows())

    def test_a_lazy_layer(self, tp: Any) -> None:
        """Regression: torch's own error named neither the layer nor a remedy."""
        model = build_model(Mlp, torch.tanh)
        model.never = nn.LazyLinear(3)
        with pytest.raises(UsageError, match=r"parallelize: layer never \(LazyLinear\) is lazy: .* run the model once"):
            parallelize(model, tp, PLAN)

    def test_a_layer_that_is_bypassed(self, tp: Any) -> None:
        """Attention reads its last layer's weights directly: the product failed with meaningless shapes."""
        model = nn.Sequential(nn.MultiheadAttention(8, 4))
        with pytest.raises(UsageError, match=r"0\.out_proj is a layer that 0 does not call.*Column"):
            parallelize(model, tp, {"0.out_proj": Row()})

    def test_a_failure_caused_by_a_part(self, tp: Any) -> None:
        """Regression: the user saw only PyTorch's error, and not that the plan caused it."""
        plain = nn.Sequential(nn.Conv2d(3, 6, 1), Counted(6), nn.Conv2d(6, 4, 1))
        x = torch.rand(2, 3, 4, 4)
        model = parallelize(plain, tp, {"0": Column(), "2": Row()})
        with pytest.raises(UsageError, match=r"with this rank's shard the model fails, after 0 .*num_features"):
            model(x)
        with pytest.raises(RuntimeError, match="expected input"):  # which the whole model refuses, too
            parallelize(nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)), tp, {"0": Column(), "1": Row()})(
                x[:, :2]
            )

    def test_weights_of_another_shape(self, tp: Any) -> None:
        """Regression: `resize_token_embeddings` replaced a part by a whole table, so that lookups were wrong."""
        words = torch.arange(6).reshape(2, 3)
        model: Any = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
        parallelize(model, tp, {"0": Vocabulary(), "1": Vocabulary(gather=True)}, example=words)
        assert model(words).shape == (2, 3, 6)
        part = model[0].weight.data
        model[0].weight.data = torch.rand(6, 4)
        with pytest.raises(UsageError, match="resize_token_embeddings"):
            model(words)
        model[0].weight.data, model[1].weight.data, model[1].bias.data = part, torch.rand(6, 4), torch.rand(6)
        with pytest.raises(UsageError, match="resize_token_embeddings"):
            model(words)
