"""Ranks that configure layers differently: with the option an error replaces wrong numbers or a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commlib.errors import MismatchError
from commlib.expert.experts import Experts
from commlib.tensor_parallel import Column, Row
from commlib_torch import DataParallel, DistributedOptimizer, SyncBatchNorm, init
from commlib_torch.expert import MoE, expertize
from commlib_torch.tensor import (
    ColumnLinear,
    ParallelAttention,
    ParallelMLP,
    RowLinear,
    VocabularyEmbedding,
    parallelize,
    vocabulary_cross_entropy,
)

PLAN: Any = {"0": Column(), "2": Row()}


def x() -> Any:
    return torch.ones(2, 3, 8)


def model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def mixture(comm: Any, **options: Any) -> Any:
    return MoE(8, Experts(**{"count": 2 * comm.size, "top_k": 1, "hidden": 4, **options}), comm)


def activated(comm: Any, activation: str) -> None:
    mixture(comm, activation=activation)


def own_experts(comm: Any, width: int) -> None:
    MoE(8, Experts(comm.size, top_k=1), comm, expert=lambda: model(width))(x())


def swapped(comm: Any, odd: bool, make: Callable[[], Any]) -> None:
    one, other = make(), make()
    if odd:
        one, other = other, one
    one(other(x()))


def loss(comm: Any, **options: Any) -> None:
    vocabulary_cross_entropy(torch.ones(3, 4), torch.tensor([0, 1, 2]), comm, **options)


def divided(comm: Any, **options: Any) -> None:
    parallelize(model(), comm, PLAN, **options)


def wrapped(network: nn.Module, odd: bool) -> None:
    init()  # as users do: process sets are created there
    if odd:
        DataParallel(network)
    else:
        DistributedOptimizer(torch.optim.SGD(network.parameters()), network.named_parameters())


def column(comm: Any) -> nn.Module:
    return ColumnLinear(8, 8, comm, style=Column(gather=True))


def row(comm: Any, units: int) -> None:
    RowLinear(8, 8, comm, style=Row(split=True, units=units))(x())


def embedding(comm: Any, words: int) -> None:
    VocabularyEmbedding(words, 8, comm)(torch.zeros(3, dtype=torch.long))


def replaced(comm: Any, **options: Any) -> None:
    expertize(nn.Sequential(model()), comm, {"0": Experts(comm.size, hidden=4, **options)})


CASES: dict[str, tuple[str, Callable[[Any, bool], object]]] = {
    "plan": ("gather=False.*gather=True", lambda c, odd: parallelize(model(), c, {"0": Column(gather=odd)})),
    "auto": ("plan: 'styles'.*plan: 'auto'", lambda c, odd: parallelize(model(), c, "auto" if odd else PLAN)),
    "verify": ("verify: 'none'", lambda c, odd: divided(c, **{"verify" if odd else "example": x()})),
    "codec": ("codec: None.*bf16", lambda c, odd: divided(c, codec="bf16" if odd else None)),
    "output": ("divided_output", lambda c, odd: divided(c, divided_output=odd)),
    "dtype": ("float32.*float64", lambda c, odd: parallelize(model().double() if odd else model(), c, PLAN)),
    "model": ("16, 8.*8, 8", lambda c, odd: parallelize(model(8 if odd else 16), c, PLAN)),
    "Column": ("gather=False.*gather=True", lambda c, odd: ColumnLinear(8, 8, c, style=Column(gather=odd))(x())),
    "Row": ("split=True.*units=4", lambda c, odd: row(c, 8 if odd else 4)),
    "order": ("layer .* on rank 0 but 'layer", lambda c, odd: swapped(c, odd, lambda: column(c))),
    "activation": ("activation", lambda c, odd: ParallelMLP(8, 16, c, activation="relu" if odd else "gelu")(x())),
    "causal": ("causal", lambda c, odd: ParallelAttention(8, 4, c, causal=odd)(x())),
    "words": (r"\(12, 8\).*\(10, 8\)", lambda c, odd: embedding(c, 10 if odd else 12)),
    "smoothing": ("label_smoothing: 0.2", lambda c, odd: loss(c, label_smoothing=0.1 if odd else 0.2)),
    "ignored": ("ignore_index: -100.*: 1", lambda c, odd: loss(c, ignore_index=1 if odd else -100)),
    "reduction": ("reduction: mean.*sum", lambda c, odd: loss(c, reduction="sum" if odd else "mean")),
    "top_k": ("top_k: 2.*top_k: 1", lambda c, odd: mixture(c, top_k=1 if odd else 2)),
    "capacity": ("capacity_over: 'rank'.*'all'", lambda c, odd: mixture(c, capacity_over="all" if odd else "rank")),
    "scores": ("scores", lambda c, odd: mixture(c, scores="sigmoid" if odd else "softmax")),
    "scale": ("scale: 1.0.*scale: 2.5", lambda c, odd: mixture(c, scale=2.5 if odd else 1.0)),
    "experts' activation": ("activation: 'gelu'.*'relu'", lambda c, odd: activated(c, "relu" if odd else "gelu")),
    "capacity_factor": ("capacity_factor: 2.*None", lambda c, odd: mixture(c, capacity_factor=None if odd else 2)),
    "experts' size": ("hidden: 4.*hidden: 6", lambda c, odd: mixture(c, hidden=6 if odd else 4)),
    "own experts' size": (r"weight: .*\[16, 8\].*\[8, 8\]", lambda c, odd: own_experts(c, 8 if odd else 16)),
    "bias_rate": ("bias_rate", lambda c, odd: mixture(c, bias_rate=0.1 if odd else 0.0)),
    "order of mixtures": ("layer .* on rank 0 but 'layer", lambda c, odd: swapped(c, odd, lambda: mixture(c))),
    "wrapper": ("'DistributedOptimizer' on rank 0 but 'DataParallel'", lambda c, odd: wrapped(model(), odd)),
    "op": ("is 'op=mean' on rank 0 but 'op=sum'", lambda c, odd: DataParallel(model(), op="sum" if odd else "mean")),
    "batch norm": ("momentum: 0.1.*momentum: 0.2", lambda c, odd: SyncBatchNorm(8, momentum=0.1 + odd / 10)(x()[0])),
    "expertize": ("z_weight", lambda c, odd: replaced(c, z_weight=0.1 if odd else 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_different_settings_get_an_error(comm: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the option and the ranks, on all of them, even if calls are no longer compared."""
    if comm.size == 1:
        return
    monkeypatch.setenv("COMMLIB_CHECK", "never")
    match, call = CASES[case]
    torch.manual_seed(0)
    with pytest.raises(MismatchError, match=rf"(?s){match}.*this is rank {comm.rank} of {comm.size}"):
        call(comm, comm.rank == comm.size - 1)


def test_settings_that_agree_are_compared_once(comm: Any) -> None:
    layers = [ColumnLinear(8, 8, comm, style=Column(gather=True)), mixture(comm), ParallelMLP(8, 16, comm)]
    counts = []
    for _ in range(3):
        before = comm.group.call_number
        for layer in layers:
            layer(x())
        counts.append(comm.group.call_number - before)
    assert counts[1] == counts[2] and (comm.size == 1 or counts[0] > counts[1])


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_frozen_on_one_rank_is_named(comm: Any, layer: int) -> None:
    """Regression: the error gave numbers of entries, and named a weight of another layer."""
    own = model()
    own[layer].requires_grad_(comm.rank > 0)
    text = rf"'{layer}\.weight: .*rank.*: a weight that is frozen on one rank must be frozen on all"
    with pytest.raises(MismatchError, match=text):
        DistributedOptimizer(torch.optim.SGD(own.parameters(), 0.1), own.named_parameters(), ranks=comm)
    with pytest.raises(MismatchError, match=text):
        DataParallel(own, ranks=comm)
