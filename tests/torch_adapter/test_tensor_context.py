"""Attention over a divided sequence matches one process, with gradients, up to rounding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from commlib.context_parallel import SequenceLayout
from commlib.errors import MismatchError, UsageError
from commlib.sharding.axis import ParallelAxis
from commlib_torch.tensor.context import attention

METHODS = ["ring", "all_to_all"]
LAYOUTS = ["balanced", "contiguous"]
DOCUMENTS = [None, (0, 5, 6, 11), (0, 3, 11), (0, 0, 10, 11), tuple(range(12))]


def drawn(heads: int, tokens: int, width: int, seed: int, batch: int = 2) -> Tensor:
    """Draw the whole sequence, the same on all ranks."""
    return torch.randn(batch, heads, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Any, scale: float | None = None) -> Tensor:
    """Compute attention by its definition on the whole sequence."""
    tokens, served = q.shape[2], q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(served, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, stop in pairwise(documents or (0, tokens)):
        seen[start:stop, start:stop] = True
    seen = seen.tril() if causal else seen
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(served, 1)


def own(x: Tensor, comm: Any, layout: str, dim: int = 2) -> Tensor:
    """Return this rank's tokens."""
    ranges = SequenceLayout(x.shape[dim], comm.size, layout).ranges(comm.rank)
    return x.index_select(dim, torch.tensor([at for part in ranges for at in part], dtype=torch.int64))


def assert_near(got: Tensor | None, want: Tensor, whole: Tensor, tolerance: float = 1e-12) -> None:
    """Compare relative to the largest element of the whole."""
    assert got is not None
    assert got.shape == want.shape
    if want.numel():
        assert float((got.double() - want).abs().max()) <= tolerance * max(float(whole.abs().max()), 1e-3)


def compare(
    comm: Any,
    whole: tuple[Tensor, Tensor, Tensor],
    *,
    axis: Any = None,
    causal: bool = True,
    documents: Any = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    **options: Any,
) -> None:
    """Compare results and all gradients with those of the whole sequence in this process."""
    layout = options.get("layout", "balanced")
    references: Any = [x.detach().clone().requires_grad_() for x in whole]
    out = expected(references[0], references[1], references[2], causal, documents, options.get("scale"))
    factors = drawn(out.shape[1], out.shape[2], out.shape[3], 9, out.shape[0])
    (out * factors).sum().backward()
    mine: Any = [own(x.detach(), comm, layout).to(dtype).requires_grad_() for x in whole]
    got = attention(mine[0], mine[1], mine[2], axis or comm, causal=causal, documents=documents, **options)
    assert got.dtype is dtype
    (got * own(factors, comm, layout).to(dtype)).sum().backward()
    assert_near(got.detach(), own(out.detach(), comm, layout), out.detach(), tolerance)
    for one, reference in zip(mine, references, strict=True):
        assert reference.grad is not None
        assert_near(one.grad, own(reference.grad, comm, layout), reference.grad, tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_attention_matches_one_process(comm: Any, method: str, layout: str, causal: bool, documents: Any) -> None:
    whole = drawn(4, 11, 6, 1), drawn(4, 11, 6, 2), drawn(4, 11, 6, 3)
    compare(comm, whole, causal=causal, documents=documents, layout=layout, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 33])
def test_sequences_of_any_length(comm: Any, method: str, causal: bool, tokens: int) -> None:
    """A sequence may be shorter than the number of ranks: ranks without tokens take part."""
    for layout in LAYOUTS:
        whole = drawn(3, tokens, 5, 1), drawn(3, tokens, 5, 2), drawn(3, tokens, 5, 3)
        compare(comm, whole, causal=causal, layout=layout, method=method, length=tokens)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (8, 4), (3, 3), (1, 1), (12, 3)], ids=str)
def test_grouped_queries(comm: Any, method: str, heads: tuple[int, int]) -> None:
    """Ranks need not divide the number of heads, which may be smaller than theirs."""
    whole = drawn(heads[0], 13, 4, 1), drawn(heads[1], 13, 4, 2), drawn(heads[1], 13, 4, 3)
    compare(comm, whole, method=method)
    compare(comm, whole, method=method, documents=(0, 6, 13), layout="contiguous")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("width", "values"), [(4, 7), (7, 4)])
def test_values_of_another_width_and_a_scale(comm: Any, method: str, width: int, values: int) -> None:
    whole = drawn(2, 9, width, 1), drawn(2, 9, width, 2), drawn(2, 9, values, 3)
    compare(comm, whole, method=method, scale=0.37)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_dtypes(comm: Any, method: str, dtype: torch.dtype, tolerance: float) -> None:
    whole = drawn(4, 70, 16, 1, 3), drawn(2, 70, 16, 2, 3), drawn(2, 70, 16, 3, 3)
    compare(comm, whole, method=method, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_exchanges_overlap_with_computation(comm: Any, causal: bool) -> None:
    """Overlap is forced here; otherwise it is used where it pays."""
    axis = ParallelAxis(comm)
    axis.overlaps = True
    whole = drawn(2, 21, 8, 1), drawn(2, 21, 8, 2), drawn(2, 21, 8, 3)
    for _ in range(3):
        compare(comm, whole, axis=axis, causal=causal)


def test_large_scores_stay_finite(comm: Any) -> None:
    """The scores of blocks are far apart: small ones vanish, and nothing becomes NaN."""
    q, k, v = drawn(1, 12, 4, 1), drawn(1, 12, 4, 2), drawn(1, 12, 4, 3)
    k[:, :, ::3] *= 1000
    compare(comm, (q * 10, k, v), causal=True, tolerance=1e-10)  # their gradients nearly vanish
    compare(comm, (q * 10, k, v), causal=False, tolerance=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_that_are_not_contiguous(comm: Any, method: Any) -> None:
    """Models have (batch, tokens, heads, head_dim) with two dimensions swapped."""
    whole: Any = [drawn(3, 10, 4, seed).detach() for seed in (1, 2, 3)]
    mine: Any = [own(x, comm, "balanced").transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in whole]
    got = attention(mine[0], mine[1], mine[2], comm, causal=True, method=method)
    want = expected(whole[0], whole[1], whole[2], True, None)
    assert_near(got.detach(), own(want, comm, "balanced"), want)
    got.transpose(1, 2).sum().backward()


def test_the_gradient_of_a_gradient(comm: Any) -> None:
    q = own(drawn(2, 9, 4, 1), comm, "balanced").requires_grad_()
    ring = attention(q, q, q, comm, causal=True).square().sum()
    with pytest.raises(UsageError, match="no gradients of gradients"):
        torch.autograd.grad(ring, q, create_graph=True)
    whole = drawn(2, 9, 4, 1).requires_grad_()

    def twice(loss: Tensor, x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), x)
        return second

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        got = twice(attention(q, q, q, comm, causal=True, method="all_to_all").square().sum(), q)
    want = twice(expected(whole, whole, whole, True, None).square().sum(), whole)
    assert_near(got, own(want, comm, "balanced"), want)


def test_autocast(comm: Any) -> None:
    x = own(drawn(2, 9, 4, 1), comm, "balanced").float()
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x, x, x, comm).dtype is torch.bfloat16


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_recomputed_and_compiled(comm: Any, method: Any) -> None:
    layer, x = torch.nn.Linear(4, 4).double(), own(drawn(2, 9, 4, 1), comm, "balanced")

    def attend(x: Tensor) -> Tensor:
        y = layer(x)
        return attention(y, y, y, comm, causal=True, method=method) * 2

    (want,) = torch.autograd.grad(attend(x).square().sum(), layer.weight)
    compiled = torch.compile(attend, backend="aot_eager")
    for run in (lambda x: checkpoint(attend, x, use_reentrant=False), compiled):
        (got,) = torch.autograd.grad(run(x).square().sum(), layer.weight)
        assert_near(got, want, want)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "star"}, "'star', expected 'ring' or 'all_to_all'"),
        ({"layout": "zigzag"}, "'zigzag', expected 'balanced' or 'contiguous'"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"documents": (0, 4)}, "from 0 to 8"),
        ({"length": 40}, "of 40 the layout"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(comm: Any, options: dict[str, Any], text: str) -> None:
    x = own(drawn(2, 8, 4, 1), comm, "balanced")
    with pytest.raises(UsageError, match=text):
        attention(x, x, x, comm, **options)


def test_mismatched_tensors_are_refused(comm: Any) -> None:
    x = own(drawn(4, 8, 4, 1), comm, "balanced")
    with pytest.raises(UsageError, match="float64, float32"):
        attention(x, x.float(), x, comm)
    with pytest.raises(UsageError, match="int64"):
        attention(x.long(), x.long(), x.long(), comm)
    with pytest.raises(UsageError, match="are no multiple"):
        attention(x, x[:, :3], x[:, :3], comm)


@pytest.mark.ranks(min=2)
def test_shards_of_another_layout_are_refused_everywhere(comm: Any) -> None:
    """All ranks raise, so that none waits for the others."""
    x = drawn(1, 5 if comm.rank else 3, 4, 1)
    with pytest.raises(UsageError, match="tokens, but of"):
        attention(x, x, x, comm)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "other",
    [{"causal": True}, {"layout": "contiguous"}, {"documents": (0, 3, 8)}, {"method": "all_to_all"}, {"scale": 0.1}],
    ids=str,
)
def test_different_arguments_on_a_rank_are_refused(comm: Any, other: dict[str, Any]) -> None:
    x = own(drawn(2, 8, 4, 1), comm, "contiguous")
    for _ in range(2):
        attention(x, x, x, comm, layout="contiguous")
    name = next(iter(other))
    options = {"layout": "balanced"} if name == "layout" else {"layout": "contiguous", **other}
    with pytest.raises(MismatchError, match=name):
        attention(x, x, x, comm, **(options if comm.rank == comm.size - 1 else {"layout": "contiguous"}))
    assert_near(attention(x, x, x, comm, layout="contiguous"), own(full(), comm, "contiguous"), full())


def full() -> Tensor:
    """The result of the last test."""
    x = drawn(2, 8, 4, 1)
    return expected(x, x, x, False, None)
