"""Divide a model of Hugging Face among ranks without a plan of one's own, and train it as one process would.

    mpirun -n 2 python examples/hugging_face_torch.py                  # Llama, of a small configuration
    mpirun -n 2 python examples/hugging_face_torch.py --model gpt2     # or GPT-2

Nothing is downloaded: the model is built from a configuration, and learns the bytes of Python's own source. `auto`
finds which layers to divide, and prints them as a table. Every rank then has half of the weights. Rank 0 trains the
whole model, too: losses, and what both generate, must be alike.
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
    """Return a model in float64, which reads bytes."""
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


def train(model: Any, words: list[Tensor]) -> list[float]:
    """Return the losses of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in words:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of whole weights
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    options = parser.parse_args()
    ranks = commlib.Mesh(tp=-1)["tp"]
    words = batches()
    whole = make_model(options.model)
    model = copy.deepcopy(whole)
    ct.parallelize(model, ranks, "auto", example={"input_ids": words[0], "labels": words[0]})
    losses = train(model, words)
    start = words[0][:1, :16]
    said = model.generate(start, do_sample=False, max_new_tokens=16, pad_token_id=0)
    if ranks.rank == 0:
        expected = train(whole, words)
        for step in range(0, STEPS, SHOWN):
            print(f"step {step:3}: loss {losses[step]:.4f}, in one process {expected[step]:.4f}")
        counts = [sum(one.numel() for one in each.parameters()) for each in (model, whole)]
        print(f"{counts[0]} of {counts[1]} parameters on each of {ranks.size} ranks")
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6, "losses differ"
        assert expected[-1] < expected[0] - 1, "it has learned nothing"
        same = whole.generate(start, do_sample=False, max_new_tokens=16, pad_token_id=0)
        assert torch.equal(said, same), "they say something else"
        print("It is the training of one process.")


if __name__ == "__main__":
    main()
