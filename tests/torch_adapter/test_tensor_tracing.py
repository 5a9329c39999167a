"""Traces of PyTorch models: equations of operations are correct, and results match those without tracing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from commlib_torch.tensor.tracing import try_trace
from tests.inputs.traces import holds


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x.t() @ x).sum(0),
        lambda x: torch.einsum("ij,kj->ik", x, x)[:, None, 0],
        lambda x: torch.stack([x, x], 1).unbind(1)[0].squeeze().unsqueeze(-1),
        lambda x: sum(iter(x)),
        lambda x: x.clone().add_(1).__setitem__(0, 2) or x,
        lambda x: x.max(0).values + x.topk(2, 1).indices.sum(),
        lambda x: F.layer_norm(x, (4,)).roll(1, 0).view(2, -1).repeat_interleave(2, 0),
        lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
    ],
)  # fmt: skip
def test_operations_are_traced(run):
    """Results match those without tracing, and shapes match the results."""

    class Runs(nn.Module):
        def forward(self, x):
            return run(x)

    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(4))
    graph, error = try_trace(Runs(), (x,), {})
    assert error is None
    assert graph.shapes[graph.outputs[0]] == tuple(run(x.clone()).shape)
    assert all(step.kind != "unseen" for step in graph.steps)


def operations():
    """Return operations with shapes of their inputs, whose lengths are even, so that halves can be computed."""
    one, heads = ((2, 4, 6),), ((2, 4, 6, 8),) * 3
    return {
        "add": (lambda x, y: x + y, ((2, 4, 6), (4, 1))),
        "lerp": (lambda x, y: torch.lerp(x, y, 0.5), ((2, 4), (4,))),
        "softmax": (lambda x: x.softmax(1), one),
        "functional softmax": (lambda x: F.softmax(x, dim=-1), one),
        "layer_norm": (lambda x: F.layer_norm(x, (6,)), one),
        "rms_norm": (lambda x: F.rms_norm(x, (4, 6)), one),
        "normalize": (lambda x: F.normalize(x, dim=0), one),
        "sum": (lambda x: x.sum((0, -1)), one),
        "mean": (lambda x: x.mean(1, keepdim=True), one),
        "max": (lambda x: x.max(1).values, one),
        "var": (lambda x: torch.var(x, dim=2), one),
        "cumsum": (lambda x: x.cumsum(1), one),
        "topk": (lambda x: x.topk(2, 1).values, one),
        "sort": (lambda x: x.sort(1).values, one),
        "roll": (lambda x: x.roll(1, 2), one),
        "flip": (lambda x: x.flip((0,)), one),
        "tril": (lambda x: x.tril(), one),
        "transpose": (lambda x: x.transpose(0, 2), one),
        "mT": (lambda x: x.mT, one),
        "t": (lambda x: x.t(), ((2, 4),)),
        "permute": (lambda x: x.permute(1, 2, 0), one),
        "unsqueeze": (lambda x: x.unsqueeze(-2), one),
        "squeeze": (lambda x: x.squeeze(1), ((2, 1, 4),)),
        "select": (lambda x: x.select(1, 2), one),
        "narrow": (lambda x: x.narrow(2, 1, 3), one),
        "getitem": (lambda x: x[:, None, 1, ..., 2:], one),
        "getitem from the end": (lambda x: x[..., None, 0], one),
        "expand": (lambda x: x.expand(3, -1, -1, 6), ((2, 4, 1),)),
        "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), one),
        "matmul": (lambda x, y: x @ y, ((2, 4, 6), (6, 8))),
        "bmm": (lambda x, y: x.bmm(y), ((2, 4, 6), (2, 6, 8))),
        "einsum": (lambda x, y: torch.einsum("...ij,kj->...ik", x, y), ((2, 4, 6), (8, 6))),
        "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), heads),
        "attention with a mask": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (*heads, (4, 6, 6))),
        "gelu": (lambda x: F.gelu(x), one),
        "dropout": (lambda x: F.dropout(x, 0.5, False), one),
        "to": (lambda x: x.to(torch.float32), one),
    }  # fmt: skip


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize("name", operations())
def test_equations_match_the_operations(name):
    """Halves of the inputs along a dimension give the halves of the result along that dimension."""
    run, shapes = operations()[name]

    class Runs(nn.Module):
        def forward(self, *inputs):
            return run(*inputs)

    draws = torch.Generator().manual_seed(1)
    inputs = [torch.rand(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    graph, error = try_trace(Runs(), inputs, {})
    assert error is None
    (equation,) = (step.equation for step in graph.steps if step.equation is not None)
    assert equation is not None
    holds(equation, lambda *arrays: run(*map(torch.from_numpy, arrays)).numpy(), *(x.numpy() for x in inputs))
