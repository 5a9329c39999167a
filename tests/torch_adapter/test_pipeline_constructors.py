"""Constructors as a model: no rank builds layers outside its stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch import pipeline

WIDTH = 6
LAYERS = 7  # two stages on each of three ranks, and one of two
EXACT = 1e-11  # microbatches are summed in another order than in one process: some ulps of float64


def constructors(count: int = LAYERS) -> tuple[list[Callable[[], nn.Module]], list[int]]:
    """Return constructors of layers, and a list of the layers that were built with memory."""
    built: list[int] = []

    def build(place: int) -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        if not layer.weight.is_meta:
            built.append(place)
        return layer

    return [lambda place=place: build(place) for place in range(count)], built  # type: ignore[misc]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def test_a_rank_builds_only_its_own_layers(comm: Any) -> None:
    make, built = constructors()
    torch.manual_seed(comm.rank)
    before = torch.get_rng_state()
    pipe = pipeline(make, comm, loss=F.mse_loss, microbatches=4)
    assert torch.equal(before, torch.get_rng_state())
    assert sorted(place for own in comm.all_gather_object(built) for place in own) == list(range(LAYERS))
    assert comm.size == 1 or len(built) < LAYERS
    whole = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)))
    state = pipe.gather_state_dict()
    whole.load_state_dict(state)
    x, y = data()
    expected = F.mse_loss(whole(x), y)
    expected.backward()
    torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=EXACT, atol=EXACT)
    named = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=EXACT, atol=EXACT)
    pipe.close()
    torch.manual_seed(comm.rank)
    other = pipeline(constructors()[0], comm, microbatches=2, schedule="interleaved", stages=2 * comm.size)
    for name, value in other.gather_state_dict().items():
        assert torch.equal(value, state[name]), "the same weights, however they are cut"
    assert len({tuple(value.flatten().tolist()) for name, value in state.items() if "weight" in name}) == LAYERS
    other.close()


def test_invalid_arguments_are_refused(comm: Any) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    for model, options, text in (
        ([lambda: 3], {}, "constructor 0 returned int"),
        ([lambda: layer, lambda: layer], {}, "returned the same layer"),
        (constructors()[0], {"split": "time"}, "no rank builds all layers"),
        (constructors()[0], {"example": data()[0]}, "no rank builds all layers"),
        ([layer, lambda: layer], {}, "expected an nn.Module or a list of them"),
    ):
        with pytest.raises(UsageError, match=text):
            pipeline(model, comm, microbatches=2, **options)
