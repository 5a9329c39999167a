"""Tokens to experts and back over real ranks, and over several hosts where tests/multihost runs this."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib import Communicator
from commlib.compress.registry import codec_of
from commlib.errors import MismatchError, UsageError
from commlib.expert.dispatchers import dispatcher_over
from commlib.expert.hierarchical_dispatcher import HierarchicalDispatcher
from commlib.expert.placement import ExpertPlacement
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from commlib.group.waits import Waits
from commlib.sharding.axis import ParallelAxis
from tests.unit.expert.test_exchange import assign, expected_rows

EXPERTS, WIDTH = 8, 33
LOSS = {None: 0.0, "bf16": 2**-8, "fp8": 2**-3}
"""What of a number is lost at most, as a fraction of it or of the largest of its block."""


def tables(comm: Communicator, step: int, rows: int = 40) -> list[Any]:
    """Return which tokens go to which experts, on each rank: varying numbers of tokens, sometimes none."""
    draw = np.random.default_rng(step)
    return [draw.random((rows * ((rank + step) % 3), EXPERTS)) < 0.3 for rank in range(comm.size)]


@pytest.mark.parametrize("codec", [None, "bf16", "fp8"])
def test_there_and_back(comm: Communicator, codec: str | None) -> None:
    """Between nodes rows may travel encoded; within a node, and gates anywhere, they travel as they are."""
    placement = ExpertPlacement.even(EXPERTS, comm.size)
    exchange = dispatcher_over(ParallelAxis(comm), placement, None if codec is None else codec_of(codec))
    loss = 0.0 if comm.one_node else LOSS[codec]
    for step in range(4):
        chosen = tables(comm, step)
        draw = np.random.default_rng(100 + step)
        xs = [draw.normal(size=(len(table), WIDTH)).astype(np.float32) for table in chosen]
        table, x = chosen[comm.rank], xs[comm.rank]
        gates = np.random.default_rng(step + comm.rank).random(int(table.sum())).astype(np.float32)
        plan, rows, received_gates, counts = exchange.dispatch("one", assign(table), x, gates)
        expected_counts = [
            sum(int(each[:, expert].sum()) for each in chosen) for expert in placement.of_rank(comm.rank)
        ]
        assert counts.tolist() == expected_counts
        expected = expected_rows(chosen, xs, placement, comm.rank, None)
        # Their order within an expert depends on the chosen path.
        first = 0
        for count in expected_counts:
            actual, own = (np.sort(each[first : first + count], 0) for each in (rows, expected))
            np.testing.assert_allclose(actual, own, atol=loss * 5, rtol=0)
            first += count
        sums = exchange.combine("one", plan, rows, received_gates)
        weights = np.zeros(table.shape)
        weights.T[table.T] = gates
        np.testing.assert_allclose(sums, x * weights.sum(1)[:, None], atol=1e-5 + 40 * loss, rtol=0)
        gradients = exchange.combine_back("one", plan, x)
        sums, numbers = exchange.dispatch_back("one", plan, gradients, received_gates)
        np.testing.assert_array_equal(numbers, gates)
        np.testing.assert_allclose(sums, x * table.sum(1)[:, None], atol=1e-5 + 40 * loss, rtol=0)


@pytest.mark.ranks(min=2)
def test_ranks_that_use_different_layers(comm: Communicator) -> None:
    """All raise, and name both; the next exchange succeeds."""
    if comm.is_hierarchical:
        pytest.skip("partners on other nodes and ranks of a node find that out one after another")
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    table = np.ones((3, EXPERTS), bool)
    x, gates = np.ones((3, WIDTH), np.float32), np.ones(3 * EXPERTS, np.float32)
    exchange.dispatch("first", assign(table), x, gates)
    with pytest.raises(MismatchError, match="layer of rank 0"):
        name = f"layer of rank {0 if comm.rank == 0 else 1}"
        exchange.dispatch(name, assign(table), x, gates)
    with pytest.raises(MismatchError, match="float"):
        exchange.dispatch("third", assign(table), x.astype([np.float32, np.float64][comm.rank == 1]), gates)
    plan, rows, received_gates, _ = exchange.dispatch("fourth", assign(table), x, gates)
    np.testing.assert_array_equal(exchange.combine("fourth", plan, rows, received_gates), EXPERTS * x)


@pytest.mark.ranks(min=2)
def test_received_rows_are_not_overwritten(comm: Communicator) -> None:
    """They stay intact while later exchanges run, however late they are released."""
    if not comm.group.shares_memory:
        pytest.skip("by messages each array is its own")
    comm = comm.split(0)
    exchange = SharedMemoryDispatcher(comm, ExpertPlacement.even(EXPERTS, comm.size))
    received: list[Any] = []
    for step in range(12):
        chosen = tables(comm, step)
        xs = [np.full((len(table), WIDTH), 100 * step + rank, np.float32) for rank, table in enumerate(chosen)]
        gates = np.ones(int(chosen[comm.rank].sum()), np.float32)
        plan, rows, received_gates, _ = exchange.dispatch("one", assign(chosen[comm.rank]), xs[comm.rank], gates)
        received.append((rows, expected_rows(chosen, xs, exchange.placement, comm.rank, None)))
        exchange.combine("one", plan, rows, received_gates)
        rows[:] += 0  # it may be written
        del rows, received_gates
        if step % 3 == comm.rank % 3:
            received.pop(0)
        for actual, expected in received:
            np.testing.assert_array_equal(actual, expected)
        if received and step % 4 == 3:
            received[0][0][:] = -1  # a poison that nobody else must see
            received.pop(0)


@pytest.mark.ranks(min=2)
def test_too_few_experts(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="every rank needs at least one"):
        ExpertPlacement.even(comm.size - 1, comm.size)


@pytest.mark.ranks(min=4)
def test_nodes_are_reached_once(comm: Communicator) -> None:
    """Through partners, as through messages to each rank."""
    nodes = comm.topology.nodes
    if comm.one_node or len({len(ranks) for ranks in nodes}) > 1:
        pytest.skip("needs several nodes with as many ranks")
    exchange = HierarchicalDispatcher(comm, ExpertPlacement.even(EXPERTS, comm.size))
    for step in range(3):
        chosen = tables(comm, step)
        table = chosen[comm.rank]
        x = np.random.default_rng(comm.rank).normal(size=(len(table), WIDTH)).astype(np.float32)
        plan, rows, received_gates, _ = exchange.dispatch(
            "one", assign(table), x, np.ones(int(table.sum()), np.float32)
        )
        sums = exchange.combine("one", plan, rows, received_gates)
        np.testing.assert_allclose(sums, x * table.sum(1)[:, None], rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(min=2)
def test_a_waiting_report_names_the_layer_and_the_step(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was late in a backward was reported as missing in a small all-gather."""
    if not comm.one_node:
        pytest.skip("the late rank sees by files that others wait")
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    table = np.ones((3, EXPERTS), bool)
    x, gates = np.ones((3, WIDTH), np.float32), np.ones(3 * EXPERTS, np.float32)
    plan, rows, received_gates, _ = exchange.dispatch("one", assign(table), x, gates)
    steps = {
        "dispatch": lambda: exchange.dispatch("one", assign(table), x, gates),
        "combine": lambda: exchange.combine("one", plan, rows, received_gates),
        "combine, backward": lambda: exchange.combine_back("one", plan, x),
        "dispatch, backward": lambda: exchange.dispatch_back("one", plan, rows, received_gates),
    }
    folder, watch = Path(comm.broadcast_object(str(tmp_path))), Waits.watch
    for number, (step, run) in enumerate(steps.items()):
        waits = folder / str(number)

        def watch_and_write(group: Waits, text: str, *peers: Any) -> Any:
            watched = watch(group, text, *peers)
            if comm.rank == 0 and ".experts" in watched.text and not waits.exists():  # noqa: B023
                new = folder / "new"  # so that nobody finds one that is not written yet
                new.write_text(watched.text)
                new.rename(waits)  # noqa: B023
            return watched

        monkeypatch.setattr(Waits, "watch", watch_and_write)
        while comm.rank == comm.size - 1 and not waits.exists():
            time.sleep(0.001)
        run()
        assert f".experts: one, {step}: " in waits.read_text()
        comm.barrier()
