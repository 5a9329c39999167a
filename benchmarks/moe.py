"""Mixtures of experts on CPUs: rows to experts and back, and a layer's step, against torch.distributed over gloo.

    mpirun -n 2 python benchmarks/moe.py [--out result.json] [--rounds 9]

"moves": dispatch and combine, top-1, the same number of float32 rows to each rank. "gloo" is two `all_to_all_single` of
the same bytes, without sorting or summing; "gloo, counts" first exchanges the counts, which are needed without a
capacity. "layer": forward and backward. "by hand" is the same layer with `all_to_all_single`, whose outputs and
gradients must be equal; "one-hot" has a capacity and masks [tokens, experts, capacity]; "dense" is an MLP with as many
active parameters; "products" is only the experts' matrix products. Contenders take turns in one process per rank, in
bursts; a figure is the slowest rank's mean. A last table shows the parts of our step.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

import commlib
from benchmarks import moe_peers
from benchmarks.moe_parts import EXCHANGES, Call, in_turn, parts, ratio, record_times, shares
from commlib.bench import gloo_peer, record
from commlib.dtypes import Array
from commlib.expert import Experts
from commlib.expert.dispatchers import dispatcher_over
from commlib.expert.placement import ExpertPlacement
from commlib.sharding.axis import ParallelAxis
from commlib_torch.expert import MoE, auxiliary_loss


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment of one expert to each token."""

    tokens: Array
    counts: Array
    starts: Array
    slots: Array

    @classmethod
    def of(cls, chosen: Array, experts: int) -> Assignment:
        """Return the assignment of tokens to their chosen experts."""
        tokens = np.argsort(chosen, kind="stable").astype(np.int32)
        slots = np.empty_like(tokens)
        slots[tokens] = np.arange(len(tokens), dtype=np.int32)
        counts = np.bincount(chosen, minlength=experts).astype(np.int64)
        return cls(tokens, counts, np.arange(len(tokens) + 1, dtype=np.int32), slots)


def moves(comm: Any, world: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    experts, width, results = arguments.experts, arguments.width, []
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(experts, comm.size))
    local = experts // comm.size
    for kib in map(int, arguments.kib.split(",")):
        rows = max(1, (kib << 10) // (4 * width))
        # The same number of tokens for each rank, evenly over its experts, in random order.
        draw = np.random.default_rng(comm.rank)
        chosen = np.repeat(np.arange(comm.size), rows) * local + np.tile(np.arange(rows) % local, comm.size)
        assigned = Assignment.of(draw.permutation(chosen), experts)
        x = draw.standard_normal((rows * comm.size, width), np.float32)
        gates = draw.random(len(x), np.float32)
        y = both_ways(exchange, assigned, x, gates)
        by_token = np.empty_like(gates)
        by_token[assigned.tokens] = gates
        np.testing.assert_array_equal(y, x * by_token[:, None])
        source = torch.from_numpy(x)
        received, back = torch.empty_like(source), torch.empty_like(source)
        counts = torch.from_numpy(assigned.counts)
        received_counts = torch.empty_like(counts)
        calls: dict[str, Call] = {
            "ours": lambda a=assigned, x=x, gates=gates: both_ways(exchange, a, x, gates),  # type: ignore[misc]
            "gloo": lambda *group, arrays=(source, received, back): peer(*arrays),
            "gloo, counts": lambda *group, arrays=(source, received, back), more=(counts, received_counts): peer(
                *arrays, *more
            ),
        }
        results.append({"nbytes": rows * 4 * width, "seconds": in_turn(world, calls, arguments.rounds)})
    return results


def both_ways(exchange: Any, assigned: Assignment, x: Array, gates: Array) -> Array:
    passage, rows, received, _ = exchange.dispatch("bench", assigned, x, gates)
    combined: Array = exchange.combine("bench", passage, rows, received)
    return combined


def peer(
    source: Tensor, received: Tensor, back: Tensor, counts: Tensor | None = None, received_counts: Tensor | None = None
) -> None:
    if counts is not None:
        dist.all_to_all_single(received_counts, counts)
    dist.all_to_all_single(received, source)
    dist.all_to_all_single(back, received)


def stepping(model: nn.Module, x: Tensor, of_y: Tensor) -> Call:
    """Return a step of a model that returns its outputs and, unless it is ours, a load-balancing loss.

    Tokens are one sequence: our loss is then over this rank's rows, like the contenders'. For inputs without a sequence
    dimension our loss would be over the rows of all ranks.
    """

    def step() -> Tensor:
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        output = model(x[None])[0] if isinstance(model, MoE) else model(x)
        y, loss = (output, auxiliary_loss(model)) if isinstance(output, Tensor) else output
        ((y * of_y).sum() + loss).backward()
        out: Tensor = y.detach()
        return out

    return step


def check(model: Any, by_hand: Any, x: Tensor, of_y: Tensor) -> None:
    """Raise AssertionError unless both have the same outputs and gradients."""
    y = stepping(model, x, of_y)()
    of_x = x.grad
    torch.testing.assert_close(stepping(by_hand, x, of_y)(), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, of_x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_hand.router.weight.grad, model.router.weight.grad, rtol=1e-4, atol=1e-4)
    for name, stack in model.experts.named_parameters():
        own = [expert.get_parameter(name).grad for expert in by_hand.experts]
        # In the manual layer an expert without tokens has no gradient.
        own = [torch.zeros_like(stack[e]) if one is None else one for e, one in enumerate(own)]
        torch.testing.assert_close(torch.stack(own), stack.grad, rtol=1e-4, atol=1e-4)


def layer(comm: Any, world: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for top_k in (1, 2):
        for hidden in map(int, arguments.hidden.split(",")):
            rows.append(_layer(comm, world, arguments, top_k, hidden))
    return rows


def _layer(comm: Any, world: Any, arguments: argparse.Namespace, top_k: int, hidden: int) -> dict[str, Any]:
    width, experts, tokens = arguments.width, arguments.experts, arguments.tokens
    torch.manual_seed(0)
    model = MoE(width, Experts(experts, top_k=top_k, hidden=hidden), comm)
    torch.manual_seed(1 + comm.rank)
    x, of_y = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, width)
    by_hand = moe_peers.ManualMoE(width, hidden, experts, top_k)
    one_hot = moe_peers.OneHotMoE(width, hidden, experts, top_k, arguments.factor)
    for other in (by_hand, one_hot):
        moe_peers.load(other, model.router.weight, dict(model.experts.named_parameters()))
    check(model, by_hand, x, of_y)
    stepping(one_hot, x, of_y)()
    counts: list[list[int]] = []
    with record_times(model.mixture, {}, counts):
        step = stepping(model, x, of_y)
        step()
    calls: dict[str, Call] = {
        "ours": step,
        "by hand": stepping(by_hand, x, of_y),
        "one-hot": stepping(one_hot, x, of_y),
        "dense": stepping(moe_peers.Dense(width, top_k * hidden), x, of_y),
        "products": moe_peers.products(counts[-1], width, hidden),
    }
    return {
        "top_k": top_k,
        "hidden": hidden,
        "dropped": max(comm.all_gather_object(one_hot.dropped)),
        "rows": comm.all_gather_object(sum(counts[-1])),
        "seconds": in_turn(world, calls, arguments.rounds),
        "parts": parts(model.mixture, step, arguments.rounds),
    }


def show(measured: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160)
    one = Table(title=f"dispatch and combine, on {ranks} ranks")
    for column in ("bytes for each rank", "ours, us", "least", "gloo", "times", "gloo, counts", "times"):
        one.add_column(column, justify="right")
    for row in measured["moves"]:
        cells = [1e6 * pick(row["seconds"]["ours"]) for pick in (statistics.median, min)]
        shown = [f"{cell:.1f}" for cell in cells]
        for name in ("gloo", "gloo, counts"):
            shown += [f"{1e6 * statistics.median(row['seconds'][name]):.0f}", ratio(row, name, "ours")]
        one.add_row(str(row["nbytes"]), *shown)
    console.print(one)
    two = Table(title=f"a layer, forward and backward, {ranks} ranks: ms, and ours as a multiple")
    names = ("ours", "by hand", "one-hot", "dense", "products")
    for column in ("top", "hidden", names[0], "least", *(c for name in names[1:] for c in (name, "times"))):
        two.add_column(column, justify="right")
    for row in measured["layer"]:
        mine = row["seconds"]["ours"]
        shown = [f"{1e3 * statistics.median(mine):.2f}", f"{1e3 * min(mine):.2f}"]
        for name in names[1:]:
            shown += [f"{1e3 * statistics.median(row['seconds'][name]):.2f}", ratio(row, "ours", name)]
        two.add_row(str(row["top_k"]), str(row["hidden"]), *shown)
    console.print(two)
    three = Table(title="parts of our step, us on rank 0 (meetings are waits within exchanges)")
    columns = ("step", "routing", "routing, backward", *EXCHANGES, "meetings")
    for column in ("top", "hidden", *columns, "share of exchanges", "share of routing", "dropped by one-hot"):
        three.add_column(column, justify="right")
    for row in measured["layer"]:
        spent = row["parts"]
        three.add_row(
            str(row["top_k"]), str(row["hidden"]), *(f"{1e6 * spent.get(name, 0.0):.0f}" for name in columns),
            *(f"{value:.1%}" for value in shares(spent)), f"{row['dropped']:.1%}",
        )  # fmt: skip
    console.print(three)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--kib", default="1,16,64,256,1024", help="sent to each rank")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each rank, for the layer")
    parser.add_argument("--hidden", default="256,1024")
    parser.add_argument("--factor", type=float, default=1.25, help="capacity factor of the layer with a capacity")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = commlib.init()
    world = MPI.COMM_WORLD
    facts = record.gather_program_facts(world)
    with gloo_peer.join_gloo(world, one_node=comm.one_node):
        measured = {"moves": moves(comm, world, arguments), "layer": layer(comm, world, arguments)}
    if comm.rank:
        return
    show(measured, comm.size)
    if arguments.out:
        record.write(arguments.out, "moe", facts, arguments, **measured)


if __name__ == "__main__":
    main()
