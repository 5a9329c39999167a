"""Mixtures of experts in TensorFlow graphs: the cost of their host nodes, and a step against a dense MLP.

    mpirun -n 2 python benchmarks/moe_keras.py [--out result.json] [--rounds 9]

"nodes": a traced function of several consecutive layers that only send rows to experts and back, forward and backward,
against the same function without these layers. Further columns show the time in host functions: routing and exchanges,
and as a part of it the waits for other ranks (meetings). The rest is TensorFlow's overhead and data passed between
nodes. "step": forward, backward and plain SGD in a tf.function of a Keras layer, and of an MLP with as many active
parameters, without communication. Contenders take turns in one process per rank, in bursts; a figure is the slowest
rank's mean.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import commlib
from benchmarks.moe_parts import EXCHANGES, Call, in_turn, parts, ratio
from commlib.bench import record
from commlib.expert import Experts
from commlib.expert.expert_ranks import ExpertRanks
from commlib.expert.mixture import Mixture
from commlib_tensorflow._host_calls import result_empty
from commlib_tensorflow.expert import MLP, MoE
from commlib_tensorflow.expert._functions import combine_tokens, route_and_dispatch

LAYERS = 4  # in one function
NODES = 4 * LAYERS  # forward and backward


def chain(mixture: Mixture | None, experts: int) -> Callable[[Any], Any]:
    """Return a traced function of layers with empty experts, forward and backward; mixture None: without layers."""

    def forward(x: Any) -> Any:
        for _ in range(LAYERS):
            x = tf.tanh(x)
            logits = x[:, :experts] * 8.0
            if mixture is None:
                x = x * tf.reduce_max(logits, 1, keepdims=True)  # gives the logits a gradient, too
                continue
            received = route_and_dispatch(x, logits, mixture, lambda logits: mixture.route(logits, training=True), [])
            x = combine_tokens(received.rows, mixture, received, x)
        return x

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(x)
        return tape.gradient(y, x)

    return tf.function(function, autograph=False)  # type: ignore[no-any-return]


def nodes(comm: Any, world: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    options = Experts(arguments.experts, top_k=1, force_balanced=True)
    mixture = Mixture("bench", options, ExpertRanks.of(comm, options.count, empty=result_empty))
    for tokens in (1, 16, 256):
        x = tf.random.normal((tokens * comm.size, arguments.width))
        functions = {"nodes": chain(mixture, options.count), "nothing": chain(None, options.count)}
        calls: dict[str, Call] = {name: partial(function, x) for name, function in functions.items()}
        rows.append(
            {
                "tokens": tokens * comm.size,
                "count": NODES,
                "seconds": in_turn(world, calls, arguments.rounds),
                "parts": parts(mixture, calls["nodes"], arguments.rounds),
            }
        )
    return rows


class Dense(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """An MLP with the same computation per token."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp = MLP(width, hidden)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the output."""
        return self.mlp(inputs)


def stepping(layer: Any, x: Any, target: Any) -> Call:
    layer(x)
    variables = layer.trainable_variables

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(x: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x, training=True) - target)) + sum(layer.losses)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(1e-4 * gradient)
        return loss

    return partial(step, x, target)


def steps(comm: Any, world: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    width, draw = arguments.width, np.random.default_rng(comm.rank)
    shape = 1, arguments.tokens, width  # one sequence; else the loss is over all ranks' rows
    x, target = (tf.constant(draw.normal(size=shape), tf.float32) for _ in range(2))
    for top_k in (1, 2):
        for hidden in map(int, arguments.hidden.split(",")):
            keras.utils.set_random_seed(0)
            layer = MoE(Experts(arguments.experts, top_k=top_k, hidden=hidden), comm)
            calls = {"ours": stepping(layer, x, target), "dense": stepping(Dense(width, top_k * hidden), x, target)}
            seconds = in_turn(world, calls, arguments.rounds)
            own = parts(layer.mixture, calls["ours"], arguments.rounds)
            rows.append({"top_k": top_k, "hidden": hidden, "seconds": seconds, "parts": own})
    return rows


def per_node(row: dict[str, Any]) -> list[float]:
    """Return the seconds of one node in each round."""
    pairs = zip(row["seconds"]["nodes"], row["seconds"]["nothing"], strict=True)
    return [(one - nothing) / row["count"] for one, nothing in pairs]


def host(spent: dict[str, float]) -> float:
    """Return the seconds of routing and exchanges."""
    return sum(seconds for name, seconds in spent.items() if name not in ("step", "meetings"))


def show(measured: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160)
    one = Table(title=f"host nodes, {ranks} ranks")
    for column in ("tokens", "us per node", "of it routing and exchange", "of it meetings"):
        one.add_column(column, justify="right")
    for row in measured["nodes"]:
        cells = [statistics.median(per_node(row)), host(row["parts"]) / NODES, row["parts"]["meetings"] / NODES]
        one.add_row(str(row["tokens"]), *(f"{1e6 * cell:.1f}" for cell in cells))
    console.print(one)
    two = Table(title=f"a step, {ranks} ranks")
    columns = ("routing", "routing, backward", *EXCHANGES, "meetings")
    for column in ("top", "hidden", "ours, ms", "dense, ms", "times", *(f"{name}, us" for name in columns)):
        two.add_column(column, justify="right")
    for row in measured["steps"]:
        cells = [f"{1e3 * statistics.median(row['seconds'][name]):.2f}" for name in ("ours", "dense")]
        cells.append(ratio(row, "ours", "dense"))
        cells += [f"{1e6 * row['parts'].get(name, 0.0):.0f}" for name in columns]
        two.add_row(str(row["top_k"]), str(row["hidden"]), *cells)
    console.print(two)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each rank, for the steps")
    parser.add_argument("--hidden", default="256,1024")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # a core for each rank
    tf.config.threading.set_inter_op_parallelism_threads(1)
    comm = commlib.init()
    world = MPI.COMM_WORLD
    facts = record.gather_program_facts(world)
    measured = {"nodes": nodes(comm, world, arguments), "steps": steps(comm, world, arguments)}
    if comm.rank:
        return
    show(measured, comm.size)
    if arguments.out:
        record.write(arguments.out, "moe_keras", facts, arguments, **measured)


if __name__ == "__main__":
    main()
