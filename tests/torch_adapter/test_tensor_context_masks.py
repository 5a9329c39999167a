"""Windows, masks and dropout of attention over a divided sequence match the softmax of the whole, by definition."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from operator import rshift
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import commlib_torch as ct
from commlib.context_parallel import SequenceLayout
from commlib.context_parallel.dropout import hash_key, hash_number, keep_threshold, start_hashes
from commlib.errors import MismatchError, UsageError
from commlib_torch.tensor.context import attention

METHODS = ["ring", "all_to_all"]
TOKENS, BATCH, HEADS = 13, 2, 4
LEAST = torch.finfo(torch.float64).min


def drawn(heads: int, width: int, seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, heads, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own(x: Tensor, comm: Any, dim: int = 2, layout: str = "balanced") -> Tensor:
    """Copy this rank's tokens."""
    ranges = SequenceLayout(x.shape[dim], comm.size, layout).ranges(comm.rank)
    return x.index_select(dim, torch.tensor([at for part in ranges for at in part], dtype=torch.int64))


def weights_of(
    q: Tensor, k: Tensor, *, causal: bool = False, scale: float = 0.5, documents: Any = None, window: Any = (-1, -1),
    mask: Tensor | None = None, key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the softmax of scores by its definition; rows without visible keys are zero."""
    tokens = q.shape[2]
    at = torch.arange(tokens)
    apart = at - at.unsqueeze(1)
    left, right = (tokens if side == -1 else side for side in window)
    seen = (apart >= -left) & (apart <= (0 if causal else right))
    together = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, stop in pairwise(documents or (0, tokens)):
        together[start:stop, start:stop] = True
    seen = (seen & together).expand(len(q), 1, tokens, tokens)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if mask is not None and mask.dtype is torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def compare(
    comm: Any, kv: int = 2, *, kept: Tensor | None = None, dtype: torch.dtype = torch.float64, near: float = 1e-11,
    tokens: int = TOKENS, values: int = 6, heads: int = HEADS, **options: Any,
) -> None:  # fmt: skip
    """Compare results, and gradients of q, k, v and an additive mask, with those of one process."""
    layout, method = options.setdefault("layout", "balanced"), options.pop("method")
    whole: Any = [drawn(heads, 6, 1, tokens), drawn(kv, 6, 2, tokens), drawn(kv, values, 3, tokens)]
    whole, factors = [x.requires_grad_() for x in whole], drawn(heads, values, 4, tokens)
    mask, key_mask = options.pop("mask", None), options.pop("key_mask", None)
    learns = mask is not None and mask.dtype is not torch.bool
    arguments = {name: value for name, value in options.items() if name not in ("layout", "dropout_p", "seed")}
    reference = mask.clone().requires_grad_() if learns else mask
    weights = weights_of(whole[0], whole[1], mask=reference, key_mask=key_mask, **arguments)
    served = heads // kv
    out = (weights if kept is None else weights * kept) @ whole[2].repeat_interleave(served, 1)
    (out * factors).sum().backward()

    mine: Any = [own(x.detach(), comm, layout=layout).to(dtype).requires_grad_() for x in whole]
    if mask is not None and mask.shape[-2] > 1:
        mask = own(mask, comm, mask.dim() - 2, layout)
    mine_of_mask = mask.clone().requires_grad_() if learns else mask
    if key_mask is not None:
        options["key_mask"] = own(key_mask, comm, 1, layout)
    got = attention(mine[0], mine[1], mine[2], comm, mask=mine_of_mask, method=method, **{"scale": 0.5} | options)
    (got * own(factors, comm, layout=layout).to(dtype)).sum().backward()
    pairs = [(got.detach(), own(out.detach(), comm, layout=layout))]
    pairs += [(one.grad, own(other.grad, comm, layout=layout)) for one, other in zip(mine, whole, strict=True)]
    if learns:
        whole_of_mask = reference.grad
        if whole_of_mask.shape[-2] > 1:
            pairs.append((mine_of_mask.grad, own(whole_of_mask, comm, mask.dim() - 2, layout)))
        else:
            pairs.append((ct.all_reduce(mine_of_mask.grad, "sum", ranks=comm), whole_of_mask))
    for one, other in pairs:
        assert one.shape == other.shape
        if other.numel():
            assert float((one.double() - other).abs().max()) <= near * max(1.0, float(other.abs().max()))


def bools(*shape: int, seed: int = 5, share: float = 0.6) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def floats(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padded() -> Tensor:
    """One example is padded on the left, as for generation, the other one on the right."""
    result = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    result[0, :4] = result[1, 9:] = False
    return result


def least(mask: Tensor) -> Tensor:
    """A mask as models of Hugging Face hide keys: a fully hidden row gives the mean of all values."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, LEAST)


def per_head(mask: Tensor) -> Tensor:
    return mask.repeat(1, HEADS, 1, 1)


CASES: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 0), "causal": True},
    "window_of_one": {"window": (0, 0)},
    "both_sides": {"window": (2, 4)},
    "left": {"window": (3, -1)},
    "right": {"window": (-1, 2), "documents": (0, 5, 6, 13)},
    "window_documents": {"window": (2, -1), "causal": True, "documents": (0, 4, 13), "layout": "contiguous"},
    "padding": {"key_mask": padded(), "causal": True},
    "padding_window": {"key_mask": padded(), "window": (2, 1), "layout": "contiguous"},
    "bools": {"mask": bools(TOKENS, TOKENS), "causal": True},
    "bools_of_heads": {"mask": bools(HEADS, TOKENS, TOKENS), "documents": (0, 7, 13), "window": (5, 3)},
    "bias": {"mask": floats(1, HEADS, TOKENS, TOKENS), "causal": True, "layout": "contiguous"},
    "bias_of_examples": {"mask": floats(BATCH, 1, TOKENS, TOKENS), "key_mask": padded(), "window": (6, -1)},
    "bias_of_keys": {"mask": floats(HEADS, 1, TOKENS)},
    "no_keys": {"mask": floats(BATCH, HEADS, TOKENS, TOKENS).masked_fill(bools(1, 1, TOKENS, 1), -torch.inf)},
    "least": {"mask": least(padded()[:, None, None] & bools(BATCH, 1, TOKENS, 1, share=0.8)), "causal": True},
    "negative_scale": {"scale": -0.7, "causal": True},
    "negative_scale_window": {"scale": -0.7, "window": (4, 1), "key_mask": padded()},
    "scale_zero": {"scale": 0.0, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_windows_and_masks_match_one_process(comm: Any, method: str, case: str) -> None:
    """Regression: windows and masks were missing; with a negative scale only keys hidden by -inf were seen: NaN."""
    compare(comm, method=method, **CASES[case])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_masks_of_other_dtypes(comm: Any, method: str, dtype: torch.dtype, near: float) -> None:
    mask = floats(HEADS, TOKENS, TOKENS)
    for kv, values in ((1, 6), (4, 9)):
        compare(comm, kv, values=values, method=method, dtype=dtype, near=near, mask=mask, window=(5, 0))


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_long_windows_and_short_sequences(comm: Any, method: str) -> None:
    """Blocks inside a window need no masks; a rank may have no tokens."""
    compare(comm, tokens=700, window=(300, 0), method=method)
    for tokens in (1, 2, 3):
        compare(comm, tokens=tokens, window=(1, 0), method=method, mask=floats(HEADS, 1, tokens))
    compare(comm, tokens=600, causal=True, method=method, mask=floats(HEADS, 600, 600))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", [(1, 1, TOKENS), (1, TOKENS, TOKENS)], ids=str)
def test_fewer_heads_than_ranks(comm: Any, method: str, mask: tuple[int, ...]) -> None:
    """A rank without heads takes part in exchanging the mask and its gradient."""
    compare(comm, 1, heads=1, method=method, mask=floats(*mask), dropout_p=0.0, causal=True)


def dropped(comm: Any, method: Any, rate: float, seed: int | None, tokens: int = TOKENS) -> Tensor:
    """Return this rank's weights after dropout, relative to those before; one-hot values reveal them."""
    q, k = drawn(HEADS, 6, 1, tokens), drawn(2, 6, 2, tokens)
    values = torch.eye(tokens, dtype=torch.float64).expand(BATCH, 2, -1, -1)
    mine = [own(x, comm) for x in (q, k, values)]
    result = attention(mine[0], mine[1], mine[2], comm, method=method, dropout_p=rate, seed=seed)
    return result / own(weights_of(q, k, scale=6**-0.5), comm)


@pytest.mark.parametrize("method", METHODS)
def test_dropped_weights_and_their_gradients(comm: Any, method: str) -> None:
    """Both methods drop the same weights in every block, at the given rate: 4 deviations of 2 * 4 * 60 * 60."""
    kept = dropped(comm, method, 0.3, 7)
    torch.testing.assert_close(kept, dropped(comm, "ring", 0.3, 7), rtol=1e-9, atol=1e-9)
    assert not torch.equal(kept, dropped(comm, method, 0.3, 8))
    of_all = torch.cat([torch.from_numpy(one) for one in comm.all_gather_object(kept.numpy())], 2)
    order = [at for rank in range(comm.size) for part in SequenceLayout(TOKENS, comm.size).ranges(rank) for at in part]
    of_all = of_all[:, :, torch.tensor(order).argsort()].contiguous()
    zeros = of_all.abs() < 1e-9
    torch.testing.assert_close(of_all[~zeros], torch.full_like(of_all[~zeros], 1 / 0.7))
    compare(comm, method=method, kept=of_all, dropout_p=0.3, seed=7, mask=floats(HEADS, TOKENS, TOKENS))
    compare(comm, method=method, kept=of_all, dropout_p=0.3, seed=7, causal=True, window=(6, 0), key_mask=padded())
    many = dropped(comm, method, 0.3, None, 60) < 1e-9
    share = ct.all_reduce(torch.stack((many.sum(), torch.tensor(many.numel()))), "sum", ranks=comm)
    assert abs(int(share[0]) / int(share[1]) - 0.3) < 4 * (0.3 * 0.7 / (BATCH * HEADS * 3600)) ** 0.5
    assert not torch.equal(many[0, 0], many[0, 1])
    assert not torch.equal(many[0, 0], many[1, 0])


def test_heads_on_different_ranks_have_different_dropout(comm: Any) -> None:
    """Ranks along tp have one seed and different heads: each draws from the stream of divided tensors."""
    tp, alone = comm, comm.split(comm.rank, 0, name="alone")
    q = drawn(HEADS, 6, 1)
    for inside, is_same in ((False, True), (True, False)):
        torch.manual_seed(4)
        with ct.streams.divided(tp) if inside else nullcontext():
            out = attention(q, q, q, alone, dropout_p=0.5)
        every = comm.all_gather_object(out.tolist())
        assert all((other == every[0]) is is_same for other in every[1:])


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
def test_dropout_follows_the_documented_recipe(comm: Any, rate: float) -> None:
    """TensorFlow then drops the same elements; 32-bit integers compute here what the recipe states in 64 bits."""
    of_rows, of_keys = start_hashes((1 << 61) + 5, rshift)
    at, rows = torch.arange(TOKENS), torch.arange(BATCH * HEADS).reshape(BATCH, HEADS, 1)
    rows = hash_number(hash_number(of_rows, rows, rshift), at, rshift)
    want = hash_number(rows.unsqueeze(-1), hash_key(of_keys, at, rshift), rshift) >= keep_threshold(rate)
    assert torch.equal(dropped(comm, "ring", rate, (1 << 61) + 5) > 1e-9, own(want, comm))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_repeats_dropout(comm: Any, method: Any, reentrant: bool) -> None:
    """In a checkpoint, ranks have different seeds, and the first rank's counts. The next call drops other elements."""
    q = own(drawn(HEADS, 6, 1), comm).requires_grad_()
    torch.manual_seed(3 + comm.rank)

    def attend(q: Tensor) -> Tensor:
        return attention(q, q, q, comm, dropout_p=0.4, method=method)

    def run(again: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3 + comm.rank)
        out = checkpoint(attend, q, use_reentrant=reentrant) if again else attend(q)
        assert isinstance(out, Tensor)
        return out, torch.autograd.grad(out.square().sum(), q)[0] if not reentrant else _gradient(out, q)

    for one, other in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(attend(q), attend(q))


def _gradient(out: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    out.square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_compiled_and_without_gradients(comm: Any) -> None:
    q, keys = own(drawn(HEADS, 6, 1), comm), own(padded(), comm, 1)

    def attend(x: Tensor) -> Tensor:
        return attention(x * 2, x, x, comm, window=(3, 0), key_mask=keys, dropout_p=0.2, seed=1)

    want = attend(q)
    with torch.no_grad():
        assert torch.equal(attend(q.requires_grad_()), want)
    assert torch.equal(torch.compile(attend, backend="eager")(q), want)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"window": 4}, "sliding window of 4096"),
        ({"scale": float("nan")}, "finite"),
        ({"mask": torch.ones(8)}, r"mask has shape \[8\]"),
        ({"mask": torch.ones(3, 1, 8)}, r"\[3, 1, 8\]"),
        ({"mask": torch.ones(1, 8, dtype=torch.int64)}, "int64, expected bool or floats"),
        ({"mask": torch.ones(1, 6)}, "has 6 keys, expected 8, all keys of the full"),
        ({"key_mask": torch.ones(2, 8)}, "key_mask is float32"),
        ({"key_mask": torch.ones(2, 40, dtype=torch.bool)}, "key_mask is bool"),
    ],
    ids=str,
)
def test_mismatched_options_are_refused(comm: Any, options: dict[str, Any], text: str) -> None:
    x = own(drawn(2, 4, 1, 8), comm)
    with pytest.raises(UsageError, match=text):
        attention(x, x, x, comm, **options)
    assert attention(x, x, x, comm).shape == x.shape


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("window", {"window": (2, 0)}),
        ("dropout_p", {"dropout_p": 0.1}),
        ("key_mask", {"key_mask": True}),
        ("mask", {"mask": torch.ones(1, 1, 8)}),
        ("refused", {"dropout_p": -1.0}),
    ],
)
def test_different_options_on_one_rank_are_refused(comm: Any, name: str, other: dict[str, Any]) -> None:
    """An invalid option of one rank is reported to the ranks that wait for it."""
    x, is_last = own(drawn(2, 4, 1, 8), comm), comm.rank == comm.size - 1
    if other.get("key_mask"):
        other = {"key_mask": torch.ones(2, x.shape[2], dtype=torch.bool)}
    expected = UsageError if name == "refused" and is_last else MismatchError
    with pytest.raises(expected, match="dropout_p is -1" if expected is UsageError else name):
        attention(x, x, x, comm, **(other if is_last else {}))
    assert attention(x, x, x, comm).shape == x.shape
