"""Deep Gradient Compression against the paper's algorithm in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commlib.compress.registry import scheme_of
from commlib.compress.scheme import BucketPart, Scheme
from commlib.compress.schemes.dgc import DGC
from commlib.errors import UsageError
from tests.bodies.loopback import run

NO_FLAGS = np.zeros(0, np.float32)
# One takes several blocks of the kernel, one is ragged, one is small and travels whole.
PARTS = [BucketPart("a", 2, (50, 100)), BucketPart("b", 5010, (333,)), BucketPart("small", 5350, (9,))]
LENGTH = 5360
RANKS = 3
STEPS = 7


def gradient(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).standard_normal(LENGTH, np.float32)


class Model:
    """One parameter on all ranks, by the paper's algorithm, in float32 as the kernels."""

    def __init__(self, count: int, scheme: DGC, small: bool) -> None:
        self.scheme, self.small = scheme, small
        self.u = np.zeros((RANKS, count), np.float32)
        self.v = np.zeros((RANKS, count), np.float32)

    def step(self, gradients: Any, number: int) -> Any:
        scheme, m = self.scheme, np.float32(self.scheme.momentum)
        total = np.zeros(self.u.shape[1], np.float32)
        for u, v, g in zip(self.u, self.v, gradients, strict=True):
            if scheme.clip_norm is not None:
                limit = scheme.clip_norm / np.sqrt(RANKS)
                norm = np.sqrt(np.sum(g.astype(np.float64) ** 2))
                g = g * np.float32(min(1.0, limit / norm))
            u[:] = m * (u + g) if scheme.nesterov else m * u + g
            if self.small:
                total += u + g if scheme.nesterov else u
                continue
            v += u
            if scheme.nesterov:
                v += g
            k = max(1, round(scheme.ratio_at(number) * len(v)))
            chosen = np.argsort(-np.abs(v), kind="stable")[:k]
            total[chosen] += v[chosen]
            u[chosen] = v[chosen] = 0
        return total


@pytest.mark.parametrize(
    "scheme",
    [
        DGC(ratio=0.01),
        DGC(ratio=0.02, momentum=0.5, nesterov=True),
        DGC(ratio=0.001, warmup=(0.5, 0.1), warmup_steps=4),
        DGC(
            ratio=0.1, clip_norm=20.0
        ),  # gradients of a have a norm of 71, of b of 18: both are clipped; the last is not
        DGC(ratio=1.0, momentum=0),
    ],
    ids=lambda scheme: scheme.name,
)
def test_dgc_matches_the_papers_algorithm(scheme):
    """To the last bit: the kernel performs the same operations in the same order."""
    scheme = replace(scheme, dense_below=100)

    def train(comm):
        reducer = scheme.reducer(comm, PARTS, key="bucket")
        sums = []
        for step in range(STEPS):
            values = gradient(comm.rank, step)
            assert reducer.reduce(values, NO_FLAGS)
            reducer.commit()
            sums.append(values)
        return sums, reducer.state()

    results = run(RANKS, train)
    models = [Model(part.count, scheme, part.name == "small") for part in PARTS]
    for step in range(STEPS):
        gradients = [gradient(rank, step) for rank in range(RANKS)]
        for model, part in zip(models, PARTS, strict=True):
            expected = model.step([g[part.start : part.stop] for g in gradients], step)
            for sums, _ in results:
                np.testing.assert_array_equal(sums[step][part.start : part.stop], expected)
    for rank, (_, state) in enumerate(results):
        for model, part in zip(models, PARTS, strict=True):
            np.testing.assert_array_equal(state[part.name]["momentum"], model.u[rank].reshape(part.shape))
            np.testing.assert_array_equal(state[part.name]["accumulated"], model.v[rank].reshape(part.shape))
            assert state[part.name]["step"] == STEPS


def test_sending_everything_clears_momentum():
    """As in the paper: sent elements have no momentum left."""

    def train(comm):
        reducer = DGC(ratio=1.0, dense_below=0).reducer(comm, [BucketPart("w", 0, (40,))])
        for _ in range(3):
            values = np.arange(1, 41, dtype=np.float32)
            reducer.reduce(values, NO_FLAGS)
            np.testing.assert_array_equal(values, 2 * np.arange(1, 41))

    run(2, train)


def test_rounding_errors_of_half_precision_are_sent_later():
    def train(comm):
        reducer = DGC(ratio=0.1, values="float16", dense_below=0).reducer(comm, [BucketPart("w", 0, (20,))])
        values = np.zeros(20, np.float32)
        values[3] = 1 + 2**-12
        reducer.reduce(values, NO_FLAGS)
        state = reducer.state()["w"]
        assert values[3] == 2 and state["accumulated"][3] == 2**-12 and state["momentum"][3] == 0

    run(2, train)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_leaves_no_trace(bad, clip_norm):
    scheme = DGC(ratio=0.01, clip_norm=clip_norm, warmup_steps=8, dense_below=100)

    def train(comm):
        reducer = scheme.reducer(comm, PARTS)
        reducer.reduce(gradient(comm.rank, 0), NO_FLAGS)
        reducer.commit()
        before = reducer.state()
        for part in PARTS:
            values = gradient(comm.rank, 1)
            if comm.rank == 1:
                values[part.start + 1] = bad
            assert not reducer.reduce(values, NO_FLAGS)
            for known in reducer.state().values():
                assert all(np.isfinite(array).all() for array in known.values())
            reducer.rollback()
            reducer.rollback()  # once is enough
            for name, known in reducer.state().items():
                for what, array in known.items():
                    np.testing.assert_array_equal(array, before[name][what])

    run(2, train)


def test_training_continues_from_a_state():
    scheme = DGC(ratio=0.01, warmup=(0.5, 0.1), warmup_steps=6, dense_below=100)
    moved = [
        BucketPart("new", 0, (200,)),
        *(BucketPart(part.name, part.start + 300, part.shape) for part in reversed(PARTS)),
    ]

    def train(comm):
        whole = scheme.reducer(comm, PARTS)
        for step in range(4):
            whole.reduce(gradient(comm.rank, step), NO_FLAGS)
        resumed = scheme.reducer(comm, moved)
        resumed.load(whole.state() | {"gone": {"momentum": np.ones(3, np.float32)}})
        for step in range(4, 8):
            values, other = gradient(comm.rank, step), np.zeros(LENGTH + 300, np.float32)
            other[300:] = values
            whole.reduce(values, NO_FLAGS)
            resumed.reduce(other, NO_FLAGS)
            for part in PARTS:
                expected = values[part.start : part.stop]
                np.testing.assert_array_equal(other[part.start + 300 : part.stop + 300], expected)

    run(2, train)


def test_warm_up_passes_through_its_ratios():
    scheme = DGC(warmup_steps=10)
    ratios = [scheme.ratio_at(step) for step in range(12)]
    assert ratios == [0.25] * 3 + [0.063] * 2 + [0.015] * 3 + [0.004] * 2 + [0.001] * 2
    assert DGC().ratio_at(0) == 0.001


def test_a_name_gives_its_scheme():
    for scheme in (DGC(), DGC(0.01, 0.5, (0.5, 0.1), 30, 2.5, True, "float16", 7), DGC(warmup=(0.5,))):
        assert isinstance(scheme, Scheme)
        assert scheme_of(scheme.name) == scheme
    assert DGC().name == "dgc:ratio=0.001"
    assert DGC().divisible and not DGC(clip_norm=1.0).divisible


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.0}, {"warmup": (0.5, 2.0)}, {"momentum": 1.0}, {"warmup_steps": -1}, {"clip_norm": 0.0},
        {"warmup": (), "warmup_steps": 3}, {"values": "int8"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options):
    with pytest.raises(UsageError, match=f"DGC: {list(options)[-1]}|DGC: ratio"):
        DGC(**options)
