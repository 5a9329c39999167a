"""Routing matches an independent reference for every option; over ranks it matches one rank with all tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib.expert.routing import Routing, route, update_bias
from tests.bodies.loopback import run
from tests.unit.expert.routing_reference import balance_of, entropy_of, gates_of, select, z_of

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 6},
    {"top_k": 2, "normalise": False, "scale": 2.5},
    {"top_k": 1, "normalise": True},
    {"top_k": 3, "scores": "sigmoid"},
    {"top_k": 2, "scores": "sigmoid", "normalise": False, "balance": "microbatch"},
    {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 0},
    {"top_k": 2, "capacity_factor": 0.7, "min_capacity": 1, "drop": "probability", "balance": "microbatch"},
    {"top_k": 1, "capacity_factor": 1.25, "min_capacity": 2},
    {"top_k": 2, "groups": 3, "max_groups": 1},
    {"top_k": 2, "groups": 2, "max_groups": 1, "scores": "sigmoid"},
    {"top_k": 3, "groups": 6, "max_groups": 4},
    {"top_k": 2, "choice": "expert"},
    {"top_k": 2, "choice": "expert", "capacity_factor": 0.5, "min_capacity": 1, "scores": "sigmoid"},
    {"top_k": 2, "force_balanced": True},
    {"top_k": 2, "balance": "none"},
]

settings.register_profile("routing", max_examples=15, deadline=None)


def experts(**options: Any) -> Experts:
    return Experts(6, **options)


def as_pairs(routing: Routing) -> dict[tuple[int, int], float]:
    """Return the gate of each (token, expert), and check that the two orders of assignments fit each other."""
    experts_of = np.repeat(np.arange(len(routing.counts)), routing.counts)
    pairs = list(zip(routing.tokens.tolist(), experts_of.tolist(), strict=True))
    assert pairs == sorted(pairs, key=lambda pair: (pair[1], pair[0])), "by expert, then by token"
    assert len(set(pairs)) == len(pairs) == len(routing.gates)
    for token in range(len(routing.starts) - 1):
        own = [pairs[slot] for slot in routing.slots[routing.starts[token] : routing.starts[token + 1]]]
        assert own == sorted(pair for pair in pairs if pair[0] == token)
    return dict(zip(pairs, routing.gates.tolist(), strict=True))


@st.composite
def inputs(draw: Any) -> tuple[Any, Any, Any, int]:
    """Draw logits without nearly equal scores, a mask, a bias, and the length of a sequence."""
    length, number = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([0, 1, 3]))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    # Steps of 1/8 over permutations: exactly equal, or clearly different in float32.
    logits = random.permuted(np.tile(np.arange(6) / 8 - 0.3, (length * number, 1)), axis=1)
    logits += random.integers(-2, 3, logits.shape) * draw(st.sampled_from([0.0, 1.0]))
    mask = draw(st.sampled_from([None, "some", "none"]))
    masked = None if mask is None else random.random(length * number) < (0.6 if mask == "some" else 0.0)
    bias = random.integers(-3, 4, 6) * 0.05 if draw(st.booleans()) else None
    return logits.astype(np.float32), masked, None if bias is None else bias.astype(np.float32), length


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_routing_matches_the_reference(options: dict[str, Any]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(inputs(), st.booleans())
    def compare(given: Any, training: bool) -> None:
        logits, mask, bias, length = given
        own = experts(**options)
        bias = None if options.get("choice") == "expert" else bias
        routing = route(own, logits, training=training, mask=mask, bias=bias, sequence=length)
        wanted = select(own, logits, mask, bias, training)
        got = as_pairs(routing)
        assert set(got) == wanted.kept
        gates = gates_of(own, logits, wanted.kept)
        for pair, gate in got.items():
            assert gate == pytest.approx(gates[pair], rel=1e-5)
        load = np.bincount([expert for _, expert in wanted.chosen], minlength=6)
        np.testing.assert_array_equal(routing.load, load)
        assert routing.dropped == len(wanted.chosen) - len(wanted.kept)
        balance = 0.0 if own.balance == "none" else balance_of(own, logits, wanted.chosen, mask, length)
        assert routing.balance == pytest.approx(balance, rel=1e-6, abs=1e-9)
        assert routing.z == pytest.approx(z_of(own, logits, mask, length), rel=1e-6, abs=1e-9)
        assert routing.entropy == pytest.approx(entropy_of(own, logits, mask), rel=1e-6, abs=1e-9)

    compare()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_match_the_reference(options: dict[str, Any]) -> None:
    """Central differences of the reference with fixed choices."""
    own = experts(**options)
    random = np.random.default_rng(3)
    logits = random.permuted(np.tile(np.arange(6) / 3 - 1, (8, 1)), axis=1).astype(np.float32)
    mask = np.array([True] * 5 + [False] + [True] * 2)
    routing = route(own, logits, training=True, mask=mask, sequence=4)
    pairs = list(as_pairs(routing))
    of_gates = random.normal(size=len(pairs)).astype(np.float32)
    of_balance, of_z = 0.7, 0.3
    wanted = select(own, logits, mask)

    def value(at: Any) -> float:
        gates = gates_of(own, at, wanted.kept)
        total = sum(float(weight) * gates[pair] for weight, pair in zip(of_gates, pairs, strict=True))
        balance = 0.0 if own.balance == "none" else balance_of(own, at, wanted.chosen, mask, 4)
        return total + of_balance * balance + of_z * z_of(own, at, mask, 4)

    got = routing.gradient(of_gates, of_balance, of_z)
    for place in np.ndindex(*logits.shape):
        step = np.zeros(logits.shape)
        step[place] = 1e-5
        expected = (value(logits + step) - value(logits - step)) / 2e-5
        assert got[place] == pytest.approx(expected, rel=1e-4, abs=2e-6), place


TOGETHER: list[dict[str, Any]] = [
    {"capacity_factor": 0.6, "min_capacity": 1, "capacity_over": "all", "balance": "global"},
    {"capacity_factor": 0.6, "min_capacity": 1, "capacity_over": "all", "drop": "probability", "balance": "global"},
    {"capacity_factor": 0.6, "min_capacity": 1, "capacity_over": "all", "drop": "random", "balance": "global"},
    {"choice": "expert", "capacity_over": "all", "balance": "global"},
    {"balance": "global", "scores": "sigmoid"},
    {"balance": "sequence"},
]


@pytest.mark.parametrize("lengths", [[4, 6], [5, 0, 3], [0, 0]])
@pytest.mark.parametrize("options", TOGETHER, ids=str)
def test_ranks_route_as_one_rank_with_all_tokens(options: dict[str, Any], lengths: Sequence[int]) -> None:
    """Each rank routes its tokens as one rank with all tokens would; the mean of global losses is the loss of all."""
    own = experts(top_k=2, **options)
    random = np.random.default_rng(1)
    logits = [random.normal(size=(length, 6)).astype(np.float32) for length in lengths]
    every = route(own, np.concatenate(logits), training=True, seed=7)
    wanted = as_pairs(every)
    firsts = np.cumsum([0, *lengths])

    def rank_main(comm: Communicator) -> tuple[float, Any]:
        routing = route(own, logits[comm.rank], training=True, seed=7 + comm.rank * (own.drop != "random"), comm=comm)
        first = firsts[comm.rank]
        mine = {(t - first, e): gate for (t, e), gate in wanted.items() if first <= t < firsts[comm.rank + 1]}
        assert as_pairs(routing) == mine
        return routing.balance, routing.gradient(np.zeros(len(routing.gates), np.float32), 1.0, 0.0)

    per_rank = run(len(lengths), rank_main)
    if own.balance == "global":
        assert np.mean([loss for loss, _ in per_rank]) == pytest.approx(every.balance)
        whole = every.gradient(np.zeros(len(every.gates), np.float32), 1.0, 0.0)
        gradients = np.concatenate([gradient for _, gradient in per_rank]) / len(lengths)
        np.testing.assert_allclose(gradients, whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("balance", ["sequence", "none", "global"])
@pytest.mark.parametrize("length", [3, 0])
def test_losses_do_not_depend_on_the_division_into_ranks(balance: str, length: int) -> None:
    """Sequences were weighted by this rank's tokens alone; rows without sequences counted as one per rank."""
    own = experts(top_k=2, balance=balance, z_weight=0.1)
    random = np.random.default_rng(1)
    logits = random.normal(size=(12, 6)).astype(np.float32)
    mask = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0], np.bool_)  # 5 tokens, and 1
    chosen = select(own, logits, mask).chosen

    def value(at: Any) -> tuple[float, float]:
        return 0.0 if balance == "none" else balance_of(own, at, chosen, mask, length), z_of(own, at, mask, length)

    def rank_main(comm: Communicator) -> tuple[tuple[float, float], Any]:
        mine = slice(6 * comm.rank, 6 * comm.rank + 6)
        routing = route(own, logits[mine], training=True, mask=mask[mine], sequence=length, comm=comm)
        return (routing.balance, routing.z), routing.gradient(np.zeros(len(routing.gates), np.float32), 1.0, 1.0)

    per_rank = run(2, rank_main)
    assert np.mean([losses for losses, _ in per_rank], axis=0) == pytest.approx(value(logits), rel=1e-6)
    got = np.concatenate([gradient for _, gradient in per_rank]) / 2
    for place in np.ndindex(*logits.shape):
        step = np.zeros(logits.shape)
        step[place] = 1e-5
        expected = (sum(value(logits + step)) - sum(value(logits - step))) / 2e-5
        assert got[place] == pytest.approx(expected, rel=1e-4, abs=2e-6), place


def test_forced_balance_matches_one_rank() -> None:
    own = experts(top_k=2, force_balanced=True)
    logits = np.zeros((12, 6), np.float32)
    every = as_pairs(route(own, logits, training=True))

    def rank_main(comm: Communicator) -> list[tuple[int, int]]:
        routing = route(own, logits[:4], training=True, comm=comm)
        return [(4 * comm.rank + token, expert) for token, expert in as_pairs(routing)]

    assert sorted(pair for pairs in run(3, rank_main) for pair in pairs) == sorted(every)


def test_a_random_order_keeps_any_token() -> None:
    """By position the last tokens would always be dropped."""
    own = experts(top_k=1, capacity_factor=0.5, min_capacity=1, drop="random")
    logits = np.zeros((60, 6), np.float32)
    logits[:, 2] = 1
    tokens = [route(own, logits, training=True, seed=seed).tokens for seed in range(200)]
    assert {len(one) for one in tokens} == {5}
    hits = np.bincount(np.concatenate(tokens), minlength=60)
    assert hits[:30].sum() == pytest.approx(500, abs=80)  # of 1000; the standard deviation is below 16
    assert hits.min() > 0
    np.testing.assert_array_equal(tokens[3], route(own, logits, training=True, seed=3).tokens)


def test_a_second_expert_is_drawn_by_its_share() -> None:
    """It is chosen with twice the probability of its share in both."""
    own = experts(top_k=2, second="random")
    logits = np.full((4000, 6), -9.0, np.float32)
    logits[:, 1], logits[:, 4] = np.log(0.8), np.log(0.2)
    routing = route(own, logits, training=True, seed=5)
    assert routing.counts[1] == 4000
    assert routing.counts[4] == pytest.approx(1600, abs=150)  # the standard deviation is 31
    both = np.diff(routing.starts) == 2
    assert routing.gates[routing.slots[routing.starts[:-1][~both]]] == pytest.approx(1)
    assert route(own, logits, training=False).counts[4] == 4000


def test_noise_applies_in_training_only() -> None:
    own = experts(noise=1.0)
    logits = np.zeros((50, 6), np.float32)
    noisy = route(own, logits, training=True, seed=1)
    assert len(np.unique(noisy.load)) > 1
    assert route(own, logits, training=False).load.tolist() == [50, 50, 0, 0, 0, 0]
    assert noisy.z == pytest.approx(np.log(6) ** 2)  # of the logits without noise
    again = route(own, logits, training=True, seed=1)
    np.testing.assert_array_equal(noisy.gates, again.gates)
    gradient = noisy.gradient(np.zeros(100, np.float32), 0.0, 1.0)
    np.testing.assert_allclose(gradient, 2 * np.log(6) / 6 / 50, rtol=1e-5)


def test_nan_logits_are_routed_safely() -> None:
    """NaN must not index outside an array."""
    logits = np.full((7, 6), np.nan, np.float32)
    for options in OPTIONS:
        routing = route(experts(**options), logits, training=True)
        assert np.isnan(routing.gates).all()
        routing.gradient(np.zeros(len(routing.gates), np.float32), 1.0, 1.0)


def test_the_bias_follows_the_load() -> None:
    own = experts(bias_rate=0.1)
    routing = update_bias(own, np.zeros(6, np.float32), np.array([0, 1, 2, 3, 4, 2]))
    np.testing.assert_allclose(routing, [0.1, 0.1, 0, -0.1, -0.1, 0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 7}, "top_k is 7, but a token can reach at most 6 experts"),
        ({"top_k": 0}, "top_k is 0, expected a whole number, at least 1"),
        ({"scores": "tanh"}, "scores is 'tanh', expected one of softmax, sigmoid"),
        ({"groups": 4}, "6 experts cannot be split into 4 equal groups"),
        ({"groups": 3, "max_groups": 4}, "max_groups is 4, expected 1 to 3"),
        ({"groups": 3, "max_groups": 1, "top_k": 3}, "can reach at most 2 experts"),
        ({"second": "random", "top_k": 1}, "second='random' is for top_k=2"),
        ({"choice": "expert", "bias_rate": 0.1}, "choice='expert' cannot be combined with bias_rate"),
        ({"capacity_factor": 0}, "capacity_factor is 0, expected a positive number"),
        ({"jitter": -1}, "jitter is -1, expected a number of at least 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 2.5}, "hidden is 2.5, expected a whole number, at least 1, or None"),
        ({"hidden": "8"}, "hidden is '8', expected a whole number"),
        ({"jitter": 1.5}, "jitter is 1.5, expected a number below 1"),
        ({"gated": 1}, "gated is 1, expected True or False"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        experts(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "gleu"}, r"mlp: activation='gleu' is for built-in MLPs, but without hidden= experts are like"),
        ({"gated": True, "bias": False}, r"mlp: gated=True, bias=False is for built-in MLPs"),
    ],
)
def test_options_that_a_conversion_ignores_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        experts(**options).check_conversion("mlp")
    experts(**options, hidden=3).check_conversion("mlp")
    experts(copy=True, activation="gelu", bias=True).check_conversion("mlp")


def test_sharded_mlps_become_no_experts() -> None:
    with pytest.raises(UsageError, match=r"mlp: up.weight is sharded already.*expertize before parallelize.*hidden="):
        experts(copy=True).check_conversion("mlp", "up.weight")
    experts(hidden=3).check_conversion("mlp", "up.weight")


def test_options_that_custom_experts_ignore_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mix: hidden=8, activation=len is for built-in MLPs, but expert= makes"):
        experts(hidden=8, activation=len).check_custom("mix")
    experts(hidden=8, activation=len, shared=1).check_custom("mix")
    experts().check_custom("mix")


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"logits of shape \[3, 5\], expected \[tokens, 6\]"):
        route(experts(), np.zeros((3, 5), np.float32), training=True)
    with pytest.raises(UsageError, match=r"logits of float64, expected float32"):
        route(experts(), np.zeros((3, 6)), training=True)
    with pytest.raises(UsageError, match=r"a mask bool\[4\], expected float32, and for a mask bool\[3\]"):
        route(experts(), np.zeros((3, 6), np.float32), training=True, mask=np.ones(4, np.bool_))
    with pytest.raises(UsageError, match="7 tokens cannot be split into sequences of 2"):
        route(experts(), np.zeros((7, 6), np.float32), training=True, sequence=2)


def test_capacity_ignores_rounding_errors() -> None:
    """10 tokens times 1.1 are 11.000000000000002."""
    assert Experts(1, top_k=1, capacity_factor=1.1).capacity(10, training=True) == 10  # no more than there are
    assert Experts(2, top_k=1, capacity_factor=2.2, min_capacity=0).capacity(10, training=True) == 10
    assert Experts(4, top_k=2, capacity_factor=1.1, min_capacity=0).capacity(20, training=True) == 11
    assert Experts(4, eval_capacity_factor=float("inf"), capacity_factor=1.0).capacity(20, training=False) == 20


def test_underflowing_scores_give_zero_gates() -> None:
    """Zeros cannot be normalised to gates that add up to 1: they stay zeros, and have no gradient."""
    logits = np.full((3, 6), -200.0, np.float32)
    routing = route(experts(top_k=2, scores="sigmoid"), logits, training=True)
    assert not routing.gates.any()
    assert np.isfinite(routing.gradient(np.ones(6, np.float32), 0.0, 0.0)).all()


def test_an_infinite_loss_gives_no_warning() -> None:
    """numpy warned of each: scalers of losses find such in gradients, and skip the step."""
    logits = np.eye(1, 4, dtype=np.float32)  # two experts are not chosen, whose shares have zeros as gradients
    routing = route(Experts(4, balance="microbatch"), logits, training=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = routing.gradient(np.zeros(len(routing.gates), np.float32), np.inf, np.inf)
    assert not np.isfinite(got).all()
