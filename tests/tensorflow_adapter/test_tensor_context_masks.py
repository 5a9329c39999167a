"""Windows, masks and dropout of attention over a divided sequence match the softmax of the whole, by definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.context_parallel import SequenceLayout
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow.tensor import context as cp
from commlib_tensorflow.tensor import streams

METHODS = ["ring", "all_to_all"]
TOKENS, BATCH, HEADS = 13, 2, 4
LEAST = np.finfo(np.float64).min


def drawn(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def own(x: Any, comm: Any, dim: int = 2, layout: str = "balanced") -> Any:
    """Return this rank's tokens."""
    places = [at for part in SequenceLayout(x.shape[dim], comm.size, layout).ranges(comm.rank) for at in part]
    return tf.constant(np.take(np.asarray(x), np.array(places, int), dim))


def weights_of(
    q: Any, k: Any, *, causal: bool = False, scale: float = 0.5, documents: Any = None, window: Any = (-1, -1),
    mask: Any = None, key_mask: Any = None,
) -> Any:  # fmt: skip
    """Compute the softmax of scores by its definition; rows without visible keys are zero."""
    tokens = q.shape[2]
    apart = np.arange(tokens) - np.arange(tokens)[:, None]
    left, right = (tokens if side == -1 else side for side in window)
    seen = (apart >= -left) & (apart <= (0 if causal else right))
    together = np.zeros((tokens, tokens), bool)
    for start, stop in pairwise(documents or (0, tokens)):
        together[start:stop, start:stop] = True
    seen = np.broadcast_to(seen & together, (q.shape[0], 1, tokens, tokens))
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    scores = tf.matmul(q, tf.repeat(k, q.shape[1] // k.shape[1], 1), transpose_b=True) * scale
    if mask is not None and mask.dtype == bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = tf.where(seen, scores, -np.inf)
    nothing = tf.reduce_all(scores == -np.inf, -1, keepdims=True)
    return tf.where(nothing, tf.zeros_like(scores), tf.nn.softmax(tf.where(nothing, tf.zeros_like(scores), scores)))


def compare(
    comm: Any, *, method: Any, kept: Any = None, graph: bool = False, heads: tuple[int, int] = (HEADS, 2),
    layout: Any = "balanced", mask: Any = None, key_mask: Any = None, tokens: int = TOKENS, **options: Any,
) -> None:  # fmt: skip
    """Compare results, and gradients of q, k, v and an additive mask, with those of one process."""
    shapes = (heads[0], 6), (heads[1], 6), (heads[1], 7)
    whole = [tf.constant(drawn(BATCH, one, tokens, width, seed=at)) for at, (one, width) in enumerate(shapes)]
    factors = drawn(BATCH, heads[0], tokens, 7, seed=4)
    learns = mask is not None and mask.dtype != bool
    reference = tf.constant(mask) if learns else mask
    arguments = {name: value for name, value in options.items() if name not in ("dropout_p", "seed", "length")}
    with tf.GradientTape() as tape:
        watched = [*whole, *([reference] if learns else [])]
        tape.watch(watched)
        weights = weights_of(whole[0], whole[1], mask=reference, key_mask=key_mask, **arguments)
        out = tf.matmul(weights if kept is None else weights * kept, tf.repeat(whole[2], heads[0] // heads[1], 1))
        loss = tf.reduce_sum(out * factors)
    wanted = [out, *tape.gradient(loss, watched)]

    has_rows = mask is not None and mask.shape[-2] > 1
    mine = [own(x, comm, layout=layout) for x in (*whole, factors)]
    if mask is not None:
        mine.append(own(mask, comm, mask.ndim - 2, layout) if has_rows else tf.constant(mask))
    options = {"scale": 0.5, "length": tokens if graph else None} | options
    if key_mask is not None:
        options["key_mask"] = own(key_mask, comm, 1, layout)

    def step(q: Any, k: Any, v: Any, factors: Any, *masks: Any) -> Any:
        with tf.GradientTape() as tape:
            inputs = [q, k, v, *(masks if learns else [])]
            tape.watch(inputs)
            given = masks[0] if masks else None
            got = cp.attention(q, k, v, comm, layout=layout, mask=given, method=method, **options)
            loss = tf.reduce_sum(got * factors)
        return [got, *tape.gradient(loss, inputs)]

    for at, (one, other) in enumerate(zip((tf.function(step) if graph else step)(*mine), wanted, strict=True)):
        if at == 4 and not has_rows:  # all queries have one: each rank has its own part
            one, other = sum(comm.all_gather_object(one.numpy())), other.numpy()
        else:
            one, other = one.numpy(), own(other, comm, 2 if at < 4 else mask.ndim - 2, layout).numpy()
        assert one.shape == other.shape
        assert not other.size or np.abs(one - other).max() <= 1e-11 * max(1, np.abs(other).max())


def padded() -> Any:
    result = np.ones((BATCH, TOKENS), bool)
    result[0, :4] = result[1, 9:] = False
    return result


def bools(*shape: int, share: float = 0.6) -> Any:
    return np.random.default_rng(5).random(shape) < share


def least(mask: Any) -> Any:
    """A mask as models of Hugging Face hide keys: a fully hidden row gives the mean of all values."""
    return np.where(mask, 0.0, LEAST)


CASES: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 0), "causal": True},
    "both_sides": {"window": (2, 4), "documents": (0, 5, 6, 13), "layout": "contiguous"},
    "padding": {"key_mask": padded(), "causal": True},
    "bools_of_heads": {"mask": bools(HEADS, TOKENS, TOKENS), "documents": (0, 7, 13), "window": (5, 3)},
    "bias": {"mask": drawn(1, HEADS, TOKENS, TOKENS, seed=6), "causal": True, "layout": "contiguous"},
    "bias_of_examples": {"mask": drawn(BATCH, 1, TOKENS, TOKENS, seed=6), "key_mask": padded(), "window": (6, -1)},
    "bias_of_keys": {"mask": drawn(HEADS, 1, TOKENS, seed=6)},
    "no_keys": {"mask": np.where(bools(1, 1, TOKENS, 1), -np.inf, drawn(BATCH, HEADS, TOKENS, TOKENS, seed=6))},
    "least": {"mask": least(padded()[:, None, None] & bools(BATCH, 1, TOKENS, 1, share=0.8)), "causal": True},
    "negative_scale": {"scale": -0.7, "causal": True},
    "scale_zero": {"scale": 0.0, "causal": True},
    "fewer_heads_than_ranks": {"heads": (1, 1), "mask": drawn(1, TOKENS, TOKENS, seed=6), "causal": True},
    "short": {"tokens": 1, "window": (1, 0), "mask": drawn(HEADS, 1, 1, seed=6)},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_windows_and_masks_match_one_process(comm: Any, method: str, case: str) -> None:
    """Regression: windows and masks were missing."""
    compare(comm, method=method, **CASES[case])


@pytest.mark.parametrize("method", METHODS)
def test_in_a_graph(comm: Any, method: str) -> None:
    mask = drawn(HEADS, TOKENS, TOKENS, seed=6)
    compare(comm, method=method, graph=True, mask=mask, key_mask=padded(), window=(6, 0), causal=True)


def dropped(comm: Any, method: Any, rate: float, seed: Any, tokens: int = TOKENS, graph: bool = False) -> Any:
    """Return this rank's weights after dropout, relative to those before; one-hot values reveal them."""
    q, k = (drawn(BATCH, heads, tokens, 6, seed=heads) for heads in (HEADS, 2))
    values = np.broadcast_to(np.eye(tokens), (BATCH, 2, tokens, tokens))
    mine = [own(x, comm) for x in (q, k, values)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return cp.attention(q, k, v, comm, length=tokens, method=method, dropout_p=rate, seed=seed)

    result = (tf.function(attend) if graph else attend)(*mine)
    return (result / own(weights_of(q, k, scale=6**-0.5), comm)).numpy()


@pytest.mark.parametrize("method", METHODS)
def test_dropped_weights_and_their_gradients(comm: Any, method: str) -> None:
    """Both methods drop the same weights in every block, at the given rate: 4 deviations of 2 * 4 * 60 * 60."""
    kept = dropped(comm, method, 0.3, 7)
    np.testing.assert_allclose(kept, dropped(comm, "ring", 0.3, 7), rtol=1e-9, atol=1e-9)
    of_all = np.concatenate(comm.all_gather_object(kept), 2)
    order = [at for rank in range(comm.size) for part in SequenceLayout(TOKENS, comm.size).ranges(rank) for at in part]
    of_all = of_all[:, :, np.argsort(order)]
    np.testing.assert_allclose(of_all[of_all > 1e-9], 1 / 0.7)
    compare(comm, method=method, kept=of_all, dropout_p=0.3, seed=7, causal=True, window=(6, 0), key_mask=padded())
    # Ranks have other generators: the first one's counts.
    keras.utils.set_random_seed(11 + comm.rank)
    generator = keras.random.SeedGenerator(3 + comm.rank)
    many = dropped(comm, method, 0.3, generator, 60) < 1e-9
    share = np.mean(np.concatenate(comm.all_gather_object(many), 2))
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / (BATCH * HEADS * 3600)) ** 0.5
    assert not np.array_equal(many[0, 0], many[0, 1])
    assert not np.array_equal(many, dropped(comm, method, 0.3, generator, 60) < 1e-9)


def test_graphs_have_the_same_dropout(comm: Any) -> None:
    pair = keras.random.SeedGenerator(5).next()
    np.testing.assert_array_equal(dropped(comm, "ring", 0.3, pair), dropped(comm, "ring", 0.3, pair, graph=True))


def test_heads_on_different_ranks_have_different_dropout(comm: Any) -> None:
    """Ranks along tp have one seed and different heads: each draws from the stream of divided tensors."""
    alone, generator = comm.split(comm.rank, 0, name="alone"), keras.random.SeedGenerator(5)
    for is_same in (True, False):
        seed = generator if is_same else streams.own(generator.next(), comm)
        every = comm.all_gather_object(dropped(alone, "ring", 0.5, seed).tolist())
        assert all((other == every[0]) is is_same for other in every[1:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropout_p": 0.1}, "needs a seed"),
        ({"window": 4}, "sliding window of 4096"),
        ({"mask": np.ones((3, 1, 8))}, r"\[3, 1, 8\]"),
        ({"mask": np.ones((1, 8), np.int64)}, "int64, expected bool or floats"),
        ({"mask": np.ones((1, 6))}, "has 6 keys, expected 8, all keys of the full"),
        ({"key_mask": np.ones((2, 40), bool)}, "key_mask is bool"),
    ],
    ids=str,
)
def test_mismatched_options_are_refused(comm: Any, options: dict[str, Any], text: str) -> None:
    x = own(drawn(2, 2, 8, 4, seed=1), comm)
    with pytest.raises(UsageError, match=text):
        cp.attention(x, x, x, comm, **options)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("name", "other"),
    [("window", {"window": (2, 0)}), ("mask", {"mask": np.ones((1, 8))}), ("refused", {"scale": np.nan})],
)
def test_different_options_on_one_rank_are_refused(comm: Any, name: str, other: dict[str, Any]) -> None:
    """An invalid option of one rank is reported to the ranks that wait for it."""
    x, is_last = own(drawn(2, 2, 8, 4, seed=1), comm), comm.rank == comm.size - 1
    expected = UsageError if name == "refused" and is_last else MismatchError
    with pytest.raises(expected, match="scale is nan" if expected is UsageError else name):
        cp.attention(x, x, x, comm, **(other if is_last else {}))
    assert cp.attention(x, x, x, comm).shape == x.shape
