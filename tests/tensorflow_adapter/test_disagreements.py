"""Ranks that configure layers differently: with the option an error replaces wrong numbers or a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from commlib.errors import MismatchError
from commlib.expert.experts import Experts
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow import SyncBatchNormalization
from commlib_tensorflow.expert import MoE
from commlib_tensorflow.tensor import ColumnDense, ParallelMLP, VocabularyEmbedding, parallelize
from commlib_tensorflow.tensor import vocabulary_cross_entropy as loss

PLAN: Any = {"up": Column(), "down": Row()}


def x() -> Any:
    return np.ones((2, 3, 8), np.float32)


def divided(comm: Any, **options: Any) -> Any:
    layers = [keras.Input((3, 8)), keras.layers.Dense(8, name="up"), keras.layers.Dense(8, name="down")]
    return parallelize(keras.Sequential(layers), comm, PLAN, **options)


def mixture(comm: Any, **options: Any) -> Any:
    return MoE(Experts(**{"count": 2 * comm.size, "top_k": 1, "hidden": 4, **options}), comm)


def swapped(odd: bool, make: Callable[[], Any]) -> None:
    one, other = make(), make()
    for layer in (one, other):
        layer.build((2, 3, 8))
    if odd:
        one, other = other, one
    one(other(x()))


def normalised(momentum: float) -> None:
    SyncBatchNormalization(momentum=momentum)(x(), training=True)


def crossed(comm: Any, **options: Any) -> None:
    loss(np.ones((3, 4), np.float32), np.array([0, 1, 2]), comm, **options)


CASES: dict[str, tuple[str, Callable[[Any, bool], object]]] = {
    "verify": ("verify: 'none'", lambda c, odd: divided(c, **{"verify" if odd else "example": x()})),
    "codec": ("codec: None.*bf16", lambda c, odd: divided(c, codec="bf16" if odd else None)),
    "Column": ("gather=False.*gather=True", lambda c, odd: ColumnDense(8, c, style=Column(gather=odd))(x())),
    "order": ("layer .* but 'layer", lambda c, odd: swapped(odd, lambda: ColumnDense(8, c, style=Column(gather=True)))),
    "activation": ("activation", lambda c, odd: ParallelMLP(8, 16, c, activation="relu" if odd else "gelu")(x())),
    "units": ("units=4.*units=8", lambda c, odd: ColumnDense(8, c, style=Column(units=8 if odd else 4))(x())),
    "words": (r"\(12, 8\).*\(10, 8\)", lambda c, odd: VocabularyEmbedding(10 if odd else 12, 8, c).build()),
    "smoothing": ("label_smoothing: 0.2", lambda c, odd: crossed(c, label_smoothing=0.1 if odd else 0.2)),
    "ignored": ("ignore_index: -100.*: 1", lambda c, odd: crossed(c, ignore_index=1 if odd else -100)),
    "top_k": ("top_k: 2.*top_k: 1", lambda c, odd: mixture(c, top_k=1 if odd else 2)),
    "capacity": ("capacity_over: 'rank'.*'all'", lambda c, odd: mixture(c, capacity_over="all" if odd else "rank")),
    "batch norm": ("momentum: 0.5.*momentum: 1", lambda c, odd: normalised(0.5 + odd / 2)),
    "order of mixtures": ("layer .* but 'layer", lambda c, odd: swapped(odd, lambda: mixture(c))),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_different_settings_get_an_error(comm: Any, case: str) -> None:
    """The error names the option and the ranks, on all of them."""
    if comm.size == 1:
        return
    match, call = CASES[case]
    with pytest.raises(MismatchError, match=rf"(?s){match}.*this is rank {comm.rank} of {comm.size}"):
        call(comm, comm.rank == comm.size - 1)


def test_settings_that_agree_are_compared_once(comm: Any) -> None:
    layers = [ColumnDense(8, comm, style=Column(gather=True)), mixture(comm)]
    counts = []
    for _ in range(4):
        before = comm.group.call_number
        for layer in layers:
            layer(x())
        counts.append(comm.group.call_number - before)
    assert counts[2] == counts[3] and (comm.size == 1 or counts[0] > counts[3])
