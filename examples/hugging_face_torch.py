"""Shard a Hugging Face model over ranks without a hand-written plan, train it, and compare with one process.

    mpirun -n 2 python examples/hugging_face_torch.py                  # Llama, of a small configuration
    mpirun -n 2 python examples/hugging_face_torch.py --model gpt2     # or GPT-2

Nothing is downloaded: the model is built from a configuration, and learns the bytes of Python's source. `auto` finds
the layers to shard, and prints them as a table. On 2 ranks, each rank then has half of the weights. Rank 0 also trains
the unsharded model: the losses must be equal within rounding, and both must generate the same text.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import commlib
import commlib_torch as ct

WIDTH, LAYERS, HEADS, TOKENS, ROWS, STEPS, SHOWN = 64, 2, 4, 64, 8, 40, 10


def make_model(kind: str) -> Any:
    """Return a model in float64, whose tokens are bytes."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(**sizes, n_positions=TOKENS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=2 * WIDTH)
    return transformers.LlamaForCausalLM(config).double()


def batches() -> list[Tensor]:
    """Return the same batches of text on every rank."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()[: STEPS * ROWS * TOKENS]
    return list(torch.tensor(list(text)).view(STEPS, ROWS, TOKENS))


def train(model: Any, text: list[Tensor]) -> list[float]:
    """Return the losses of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in text:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the full weights
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    options = parser.parse_args()
    ranks = commlib.Mesh(tp=-1)["tp"]
    text = batches()
    unsharded = make_model(options.model)
    model = copy.deepcopy(unsharded)
    ct.parallelize(model, ranks, "auto", example={"input_ids": text[0], "labels": text[0]})
    losses = train(model, text)
    start = text[0][:1, :16]
    generated = model.generate(start, do_sample=False, max_new_tokens=16, pad_token_id=0)
    if ranks.rank == 0:
        expected = train(unsharded, text)
        for step in range(0, STEPS, SHOWN):
            print(f"step {step:3}: loss {losses[step]:.4f}, in one process {expected[step]:.4f}")
        counts = [sum(one.numel() for one in each.parameters()) for each in (model, unsharded)]
        print(f"{counts[0]} of {counts[1]} parameters on each of {ranks.size} ranks")
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6, "losses differ"
        assert expected[-1] < expected[0] - 1, "the loss has not fallen"
        expected_text = unsharded.generate(start, do_sample=False, max_new_tokens=16, pad_token_id=0)
        assert torch.equal(generated, expected_text), "the generated texts differ"
        print("Equal to training in one process.")


if __name__ == "__main__":
    main()
