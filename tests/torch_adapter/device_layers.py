"""Bodies of tests: divided layers, experts and stages on a device compute the results of the host. See `place`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib_torch as ct
from commlib.context_parallel import SequenceLayout
from commlib_torch.tensor.context import attention
from tests.torch_adapter.expert_oracle import WIDTH, build_layer, layer, near, step, tokens
from tests.torch_adapter.place import Place

Put = Callable[[Tensor], Tensor]
TOLERANCE = 1e-4  # products in float32, which other libraries add up in a different order


def _both(place: Place, run: Callable[[str, Put], dict[str, Tensor]], tolerance: float = TOLERANCE) -> None:
    """Compare what `run` returns on the host and on the device."""
    with place.host():
        expected = run("cpu", torch.Tensor.clone)
    result = run(place.device, place.put)
    assert result.keys() == expected.keys()
    for name, got in result.items():
        assert got.device.type == place.device
        near(got.detach().cpu(), expected[name].detach(), name, tolerance)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def divided_layers(comm: Any, place: Place) -> None:
    """A plan copies inputs and gathers them along a sequence; it sums outputs and scatters them."""

    def run(device: str, put: Put) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)).to(device)
        model = ct.parallelize(model, comm, {"0": ct.Column(), "2": ct.Row()})
        x = put(torch.arange(60.0).view(1, 5, 12).sin()).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        assert x.grad is not None
        return {"y": y, "of x": x.grad, **_gradients(model)}

    _both(place, run)


def divided_sequences(comm: Any, place: Place) -> None:
    """The sequence is divided unevenly between layers: rows are gathered, and sums are scattered."""
    length = 2 * comm.size + 1

    def run(device: str, put: Put) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)).to(device)
        model = ct.parallelize(
            model, comm, {"0": ct.Column(sequence=1), "1": ct.tensor.Sequence(-1), "2": ct.Row(sequence=1)}
        )
        x = put(torch.arange(float(3 * length * 12)).view(3, length, 12).sin()).requires_grad_()
        y = model(ct.tensor.scatter(x, comm, 1))
        whole = ct.tensor.gather(y, comm, 1)
        whole.square().sum().backward()
        assert x.grad is not None
        return {"y": y, "whole": whole, "of x": x.grad, **_gradients(model)}

    _both(place, run)


def experts(comm: Any, place: Place) -> None:
    """Tokens travel to experts and back, and their rows stay on the device."""
    _experts(comm, place, chunks=1)


def experts_in_parts(comm: Any, place: Place) -> None:
    """Like `experts`, but some tokens travel while experts compute others."""
    _experts(comm, place, chunks=3)


def _experts(comm: Any, place: Place, chunks: int) -> None:
    ranks = comm.split(0)  # with communication channels of its own
    places: list[set[str]] = []

    def run(device: str, put: Put) -> dict[str, Tensor]:
        options = ct.Experts(4, top_k=2, hidden=10, capacity_factor=1.25, chunks=chunks)
        model: Any = build_layer(layer(options), ranks).to(device)
        y, loss, of_x = step(model, put(tokens(comm)[comm.rank]))
        assert y.shape[-1] == WIDTH
        places.append(set(model.mixture.exchange.places))
        return {"y": y, "loss": loss, "of x": of_x, **_gradients(model)}

    _both(place, run)
    assert places == [{""}, {"", place.name}]  # layers of the same ranks share their channels


def experts_of_halves(comm: Any, place: Place) -> None:
    """Under autocast to bfloat16, gates stay float32."""

    def run(device: str, put: Put) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model: Any = layer(ct.Experts(4, top_k=2, hidden=10))(comm).to(device)
        x = put(tokens(comm)[comm.rank].bfloat16()).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        assert y.dtype == torch.bfloat16
        return {"y": y, "of x": x.grad, **_gradients(model)}

    _both(place, run, 2**-5)  # products in bfloat16


def stages(comm: Any, place: Place) -> None:
    """A pipeline of stages on a device."""

    def run(device: str, put: Put) -> dict[str, Tensor]:
        torch.manual_seed(4)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double().to(device)
        pipe = ct.pipeline(model, comm, schedule="1f1b", microbatches=4, loss=F.mse_loss)
        x, y = put(torch.arange(48.0).view(8, 6).double().cos()), put(torch.ones(8, 6).double())
        loss = pipe.step(x, y)
        result = {"loss": loss.to(device), **_gradients(pipe)}
        pipe.close()
        return result

    _both(place, run)


def sequences_by_a_ring(comm: Any, place: Place) -> None:
    """Attention over a divided sequence sends keys, values and their gradients from device to device."""
    _sequences(comm, place, "ring")


def sequences_by_heads(comm: Any, place: Place) -> None:
    """Like `sequences_by_a_ring`, by all-to-all."""
    _sequences(comm, place, "all_to_all")


def _sequences(comm: Any, place: Place, method: Any) -> None:
    lengths = SequenceLayout(4 * comm.size + 3, comm.size, "balanced").counts

    def run(device: str, put: Put) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for turn in range(3):  # each message reuses the slot of an earlier one
            torch.manual_seed(10 * comm.rank + turn)
            q, k, v = (put(torch.randn(2, heads, lengths[comm.rank], 6)).requires_grad_() for heads in (4, 2, 2))
            out = attention(q, k, v, comm, causal=True, method=method)
            out.square().sum().backward()
            assert q.grad is not None and k.grad is not None and v.grad is not None
            results |= {f"{turn}": out, f"{turn} of q": q.grad, f"{turn} of k": k.grad, f"{turn} of v": v.grad}
        return results

    _both(place, run)


BODIES = [
    divided_layers, divided_sequences, experts, experts_in_parts, experts_of_halves, stages, sequences_by_a_ring,
    sequences_by_heads,
]  # fmt: skip
