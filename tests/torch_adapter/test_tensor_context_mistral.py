"""Mistral of Hugging Face with a divided sequence: a sliding window and padding match one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import commlib_torch as ct

pytestmark = pytest.mark.long  # transformers takes longer to import than all the rest

TOKENS, WORDS = 17, 31


def test_a_sliding_window_and_padding(comm: Any) -> None:
    """The model's window includes the token itself: sliding_window=5 is (4, 0)."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, max_position_embeddings=64,
    )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    options: dict[str, Any] = {}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: Any = None, dropout: float = 0.0,
        sliding_window: int | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        window = None if sliding_window is None else (sliding_window - 1, 0)
        result = ct.context.attention(
            q, k, v, comm, causal=True, scale=scaling, window=window, dropout_p=dropout, **options
        )
        return result.transpose(1, 2), None

    transformers.AttentionInterface.register("context", attend)
    divided = copy.deepcopy(plain)
    divided.set_attn_implementation("context")
    tokens, seen = torch.randint(WORDS, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.int64)
    seen[0, 13:] = 0
    labels = tokens.masked_fill(seen == 0, -100)
    # Its own loss is in float32, so take only the labels.
    logits = plain(tokens, attention_mask=seen).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    for options["method"] in ("ring", "all_to_all"):
        divided.zero_grad()
        loader = ct.context.SequenceLoader([{"input_ids": tokens, "labels": labels, "attention_mask": seen}], comm)
        (batch,) = loader
        options["key_mask"] = batch["attention_mask"].bool()
        result = divided(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        total = F.cross_entropy(result.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = ct.context.loss_mean(total, (batch["labels"] != -100).sum(), comm)
        (
            loss / comm.size
        ).backward()  # as large as in one process: otherwise norms, rounded to float32, differ 3 times as much
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        for one, other in zip(divided.parameters(), plain.parameters(), strict=True):
            gradient = ct.all_reduce(one.grad, "sum", ranks=comm)
            torch.testing.assert_close(gradient, other.grad, rtol=1e-8, atol=1e-10)
