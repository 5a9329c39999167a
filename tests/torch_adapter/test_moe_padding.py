"""Padding and single rows: outputs, losses and gradients match a dense mixture of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_torch import gather_state_dict
from commlib_torch._shards import shard_of
from commlib_torch.expert import MoE, auxiliary_loss
from tests.torch_adapter.expert_oracle import near

WIDTH = 8
ROWS = 2  # of each rank


def build(comm: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    chosen: dict[str, Any] = {"top_k": 2, "hidden": 6, "shared": 1, "balance_weight": 1.0, "z_weight": 0.5, **options}
    return MoE(WIDTH, Experts(2 * comm.size, **chosen), comm).double()


def data(comm: Any, *, flat: bool = False) -> tuple[Tensor, Tensor]:
    """Return the tokens of all ranks and the padding mask: later ranks have more padding, which is NaN."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS * comm.size, 4, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([4, 3, 1, *[2] * (ROWS * comm.size)])[: len(x)]
    lengths[-1] = 0
    mask = torch.arange(4) < lengths[:, None]
    x[~mask] = torch.nan
    return (x.flatten(0, 1), mask.flatten()) if flat else (x, mask)


def dense(weights: Mapping[str, Tensor], options: Experts, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a mixture in plain PyTorch, all experts for all tokens; return outputs and the weighted router loss."""
    rows = x.reshape(len(x), -1, WIDTH) if x.dim() > 2 else x[None]
    there = mask.reshape(rows.shape[:2])
    rows = torch.where(there[..., None], rows, 0.0)
    logits = rows.float() @ weights["router.weight"].float().T
    shares = logits.double().softmax(-1)
    gates, experts = shares.topk(options.top_k)
    gates = gates / gates.sum(-1, keepdim=True)
    y = mlp(weights, "shared.", rows, None)
    often = torch.zeros_like(shares)
    for expert in range(options.count):
        chosen = experts == expert
        y = y + (gates * chosen).sum(-1)[..., None] * mlp(weights, "experts.", rows, expert)
        often[..., expert] = chosen.any(-1) & there
    lengths = there.sum(1).clamp(min=1)[:, None]
    balance = (often.sum(1) / lengths * (shares * there[..., None]).sum(1) / lengths).sum(-1)
    z = (logits.double().logsumexp(-1) ** 2 * there).sum(1, keepdim=True) / lengths
    loss = options.balance_weight * options.count / options.top_k * balance.mean() + options.z_weight * z.mean()
    return torch.where(there[..., None], y, 0.0).reshape(x.shape), loss


def mlp(weights: Mapping[str, Tensor], prefix: str, rows: Tensor, expert: int | None) -> Tensor:
    up, bias, down, other = (
        weights[prefix + name] if expert is None else weights[prefix + name][expert]
        for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    )
    return F.linear(F.gelu(F.linear(rows, up, bias)), down, other)


@pytest.mark.parametrize("kind", ["sequences", "rows", "parts"])
def test_padding_matches_a_dense_mixture_of_all_rows(comm: Communicator, kind: str) -> None:
    """Regression: shared experts processed padding, its NaN reached the router, and losses covered one rank's rows."""
    model = build(comm, chunks=2 if kind == "parts" else 1)
    xs, mask = data(comm, flat=kind == "rows")
    weights = {name: value.detach().clone() for name, value in gather_state_dict(model).items()}
    for value in weights.values():
        value.requires_grad_()
    whole = xs.clone().requires_grad_()
    expected, whole_loss = dense(weights, model.options, whole, mask)
    (torch.sin(expected).sum() / comm.size + whole_loss).backward()  # the mean over ranks of their sums
    mine = slice(len(xs) // comm.size * comm.rank, len(xs) // comm.size * (comm.rank + 1))
    x = xs[mine].clone().requires_grad_()
    y = model(x, mask[mine])
    assert not y[~mask[mine]].any()
    near(y, expected[mine], "outputs")
    loss = auxiliary_loss(model)
    near(torch.tensor(comm.all_gather_object(loss.item())).mean(), whole_loss.float(), "loss")
    (torch.sin(y).sum() + loss).backward()
    assert x.grad is not None and whole.grad is not None
    near(x.grad / comm.size, whole.grad[mine], "gradient of the inputs")
    for name, parameter in model.named_parameters():
        gradient, of_all, shard = parameter.grad.clone(), weights[name].grad, shard_of(parameter)
        assert of_all is not None
        if shard is None:
            comm.all_reduce(gradient.numpy(), out=gradient.numpy())
        else:
            of_all = torch.from_numpy(shard.own(of_all.numpy()))
        near(gradient / comm.size, of_all, name)


@pytest.mark.ranks(min=2)
def test_ranks_without_rows_or_tokens_take_part(comm: Communicator) -> None:
    """One rank has only padding, and another has no rows."""
    model = build(comm)
    xs, mask = data(comm)
    for last in (slice(None), slice(0, 0)):
        x, there = xs[:ROWS], mask[:ROWS]
        if comm.rank == comm.size - 1:
            x, there = x[last], torch.zeros_like(there)[last]
        given = x.clone().requires_grad_()
        y = model(given, there)
        (y.sum() + auxiliary_loss(model)).backward()
        assert given.grad is not None and given.grad.isfinite().all()
        assert y.any() == (comm.rank < comm.size - 1)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_masks_of_the_wrong_shape_are_refused(comm: Communicator) -> None:
    """Regression: a mask with as many tokens in another order was accepted."""
    model = build(comm)
    x = torch.ones(2, 3, WIDTH, dtype=torch.float64)
    for mask in (torch.ones(3, 2, dtype=torch.bool), torch.ones(2, 3), torch.ones(6, dtype=torch.bool)):
        with pytest.raises(UsageError, match=r"MoE: a mask torch\..* expected torch.bool\[2, 3\], False for padding"):
            model(x, mask)


@pytest.mark.ranks(min=2)
def test_sequences_on_one_rank_and_rows_on_another(comm: Communicator) -> None:
    model = build(comm)
    x = torch.ones(2, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(MismatchError, match=r"MoE.*sequences: "):
        model(x if comm.rank else x[0])
