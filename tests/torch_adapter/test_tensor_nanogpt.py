"""nanoGPT as published, whose attention uses whole shapes: `auto` reports these lines and a remedy."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.tensor_parallel import Column, Plan, Row
from commlib_torch.tensor import gather_state_dict, parallelize
from tests.inputs.plan_tables import reason

WIDTH, HEADS, LONGEST = 16, 4, 8


class Attention(nn.Module):
    """B, T, C and `self.n_head` occur in one shape: C // self.n_head is valid only for the whole."""

    bias: Tensor

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout, self.flash = HEADS, WIDTH, 0.0, flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = self.attended(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)  # type: ignore[no-any-return]

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
        return F.softmax(att, dim=-1) @ v


class Open(Attention):
    """Attention with the remedy of `auto`: -1 for sizes that are smaller on a rank."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (one.view(B, T, -1, C // self.n_head).transpose(1, 2) for one in (q, k, v))
        y = self.attended(q, k, v).transpose(1, 2).contiguous().view(B, T, -1)
        return self.c_proj(y)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, kind: type[Attention], flash: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), kind(flash), nn.LayerNorm(WIDTH)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))  # type: ignore[no-any-return]


def rows(seed: int = 1) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trains_alike(model: nn.Module, plain: nn.Module) -> None:
    for one in (model, plain):
        optimizer = torch.optim.AdamW(one.parameters(), 0.01)
        for step in range(3):
            optimizer.zero_grad()
            one(rows(step)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(gather_state_dict(model), dict(plain.state_dict()), rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("flash", [True, False])
def test_auto_reports_lines_that_keep_attention_whole(comm: Any, flash: bool) -> None:
    """Regression: it reported `split`, which needs no change, and not the line that does."""
    plain, reports = Block(Attention, flash), [""]
    model = copy.deepcopy(plain)
    parallelize(model, comm, "auto", example=rows(), report=lambda table: reports.append(table))
    if comm.rank == 0:
        row = reason(reports[-1], "attn.c_attn")
        lines = re.findall(r"view in attn, \S*test_tensor_nanogpt.py:(\d+) requests the shape (\[[^]]*\])", row)
        assert [shape for _, shape in lines] == [*["[2, 5, 4, 4]"] * 3, "[2, 5, 16]"], row
        assert len({line for line, _ in lines}) == 4, row
        assert "but a rank has less than 4 in dimension 2: use -1" in row
    assert model.c_fc.weight.shape[0] == 4 * WIDTH // comm.size
    assert model.attn.c_attn.weight.shape[0] == 3 * WIDTH
    trains_alike(model, plain)


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("flash", [True, False])
def test_with_the_suggested_change_attention_is_divided(comm: Any, flash: bool) -> None:
    plain = Block(Open, flash)
    model = copy.deepcopy(plain)
    parallelize(model, comm, "auto", example=rows(), report=lambda table: None)
    assert model.attn.c_attn.weight.shape[0] == 3 * WIDTH // comm.size
    assert model.attn.n_embd == WIDTH // comm.size
    trains_alike(model, plain)


def test_unchangeable_code_gathers_heads(comm: Any) -> None:
    """Each rank has as few weights, at the price of more traffic."""
    plan: Plan = {"attn.c_attn": Column(gather=True), "attn.c_proj": Row(split=True)}
    plain = Block(Attention, True)
    model = parallelize(copy.deepcopy(plain), comm, plan, verify=rows())
    assert model.attn.c_attn.weight.shape[0] < 3 * WIDTH or comm.size == 1
    trains_alike(model, plain)
