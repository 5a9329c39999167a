"""Train a byte-level language model with mixtures of experts, and compare with one process.

    mpirun -n 2 python examples/moe_torch.py                              # Switch: each token goes to one of 8 experts
    mpirun -n 2 python examples/moe_torch.py --top-k 2                    # or to two
    mpirun -n 2 python examples/moe_torch.py --top-k 2 --capacity 1.25    # and full experts drop tokens

The model is plain PyTorch. Every rank has different rows of a batch and some of the experts; tokens are sent to their
experts. Rank 0 then trains the full model on full batches: losses and weights must be equal within rounding. At the
end the load of each expert is printed.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import commlib
import commlib_torch as ct
from commlib.expert.stats import draw_stats

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS, SHOWN = 64, 2, 4, 64, 8, 40, 10


class Embed(nn.Module):
    """An embedding of bytes, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.words(text) + self.positions.weight
        return out


class Block(nn.Module):
    """Causal attention and an MLP, which experts replace; each with a norm before and a residual around."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)]
        q, k, v = heads
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


def make_model(ranks: commlib.Mesh | commlib.Communicator, experts: ct.Experts) -> nn.Module:
    """Return a model whose weights do not depend on the ranks that share the experts."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(Embed(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    return ct.expertize(model, ranks, {"*.mlp": experts})


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return windows of the source of Python's standard library, and the next byte of each of their bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(stream) - CONTEXT, (STEPS, ROWS), generator=torch.Generator().manual_seed(1))
    windows = stream[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)]
    return [(window[:, :-1], window[:, 1:].contiguous()) for window in windows]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Train on these rows; return their loss, including the routers' loss."""
    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) + ct.auxiliary_loss(model)
    loss.backward()
    ct.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument(
        "--capacity", type=float, help="capacity of an expert, as a multiple of its even share (default: unlimited)"
    )
    arguments = parser.parse_args()
    # capacity_over: the dropped tokens must not depend on the number of ranks, else one process would drop others. It
    # counts the ranks that share experts: all ranks, if the number of experts is a multiple of the number of ranks.
    experts = ct.Experts(
        arguments.experts, top_k=arguments.top_k, capacity_factor=arguments.capacity, capacity_over="all"
    )
    comm = commlib.init()
    torch.set_num_threads(1)
    mesh = commlib.Mesh(dp=-1)
    model = make_model(mesh, experts)
    optimizer = ct.DistributedOptimizer(optimizer_of(model), model.named_parameters(), mesh=mesh)
    text, losses = batches(), []
    for number, (x, y) in enumerate(text):
        own = train_step(model, optimizer, x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank])
        losses.append(float(sum(comm.all_gather_object(own))) / comm.size)
        if comm.rank == 0 and number % SHOWN == SHOWN - 1:
            print(f"step {number + 1:>3}: loss {losses[-1]:.3f}", flush=True)

    # Collective on all ranks: the stacks of all experts, and the statistics of all tokens.
    state, stats = ct.gather_state_dict(model), ct.expert_stats(model)
    alone = comm.split(comm.rank, name="alone")
    if comm.rank > 0:
        return
    print(draw_stats(stats))
    assert alone is not None
    full = make_model(alone, experts)
    plain = optimizer_of(full)
    expected = [train_step(full, plain, x, y) for x, y in text]
    # float32: another order of sums changes a loss by some 1e-7, and a weight by more after these steps of Adam.
    loss_gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    weight_gap = max(float((state[name] - value).abs().max()) for name, value in full.state_dict().items())
    if loss_gap > 1e-3 or weight_gap > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"losses differ by {loss_gap}, weights by {weight_gap}: {losses} {expected}")
    print(f"{experts.count} experts on {comm.size} ranks: loss {losses[0]:.3f} to {losses[-1]:.3f}, as in one process")
    print(f"(losses differ by {loss_gap:.1e} at most, weights by {weight_gap:.1e})")


if __name__ == "__main__":
    main()
