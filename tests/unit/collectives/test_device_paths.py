"""The path of device arrays: by the order of a table, by measured times, or by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commlib.collectives import call_table
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.paths import Path, order_by_times
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.cost.chooser import Chooser
from commlib.cost.records import Entry, MeasuredTime
from commlib.cost.table import Table
from commlib.errors import MismatchError, PeerError, UsageError
from commlib.tune import measure, stopwatch
from tests.bodies import loopback
from tests.late import LATE

CONFIG = Config(timeout=10, device_slot_kib=64)
COUNT = 6000


@pytest.fixture(autouse=True)
def reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LATE, "has_signals", True)
    monkeypatch.setattr(LATE, "has_reach", True)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of copies from and to the host, in bytes."""
    copied: list[int] = []
    copy = LATE.copy

    def counting(target: Any, source: Any) -> None:
        if isinstance(target, np.ndarray) or isinstance(source, np.ndarray):
            copied.append(target.nbytes)
        copy(target, source)

    monkeypatch.setattr(LATE, "copy", counting)
    return copied


def run(size: int, function: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    """Run it on ranks that are threads, each with a stream of its own: else they would wait for each other's calls."""

    def there(comm: Communicator) -> Any:
        with LATE.using(LATE.stream()):
            return function(comm)

    return loopback.run(size, there, config=options.pop("config", CONFIG), **options)


def chooser(*times: MeasuredTime, verb: str = "all_reduce", nodes: int = 1, ranks: int = 2) -> Chooser:
    return Chooser(table=Table((Entry(verb, nodes, ranks, "", "any", times, "late"),)))


def time(name: str, seconds: float, up_to: int = 1 << 20) -> MeasuredTime:
    return MeasuredTime(up_to, name, 0, seconds)


def summed(comm: Communicator, count: int = COUNT, **options: Any) -> None:
    """Add up ones; the result is right by every path."""
    x = LATE.empty((count,))
    LATE.kernels.fill(LATE.wrap(x, "x"), 1)
    got = comm.all_reduce(x, **options)
    assert (got.numpy() == comm.size).all()


@pytest.mark.parametrize(
    ("names", "times", "order"),
    [
        (["a", "b", "c"], [], [0, 1, 2]),
        (["a", "b", "c"], ["c", "b", "a"], [2, 1, 0]),
        (["a", "b", "c"], ["c", "a"], [2, 1, 0]),  # b stays: it has no time
        (["a", "b", "a", "c"], ["c", "b", "a"], [3, 1, 0, 2]),  # two of one name
        (["a", "b"], ["x", "b", "y", "a"], [1, 0]),
    ],
)
def test_timed_paths_are_reordered(names: list[str], times: list[str], order: list[int]) -> None:
    assert order_by_times(names, times) == order


@pytest.mark.parametrize(
    ("is_reached", "config", "devices", "nodes", "expected"),
    [
        (True, CONFIG, (), None, ("node", "host")),
        (False, CONFIG, (), None, ("node", "host")),  # through host memory
        (True, CONFIG, ("late",), None, ("node", "messages", "host")),
        (True, Config(timeout=10, device_peers=False), (), None, ("host",)),
        (True, CONFIG, (), [0, 0, 1, 1], ("hierarchical", "host")),
        (True, CONFIG, ("late",), [0, 1], ("messages", "host")),
    ],
)
def test_available_paths_are_listed(
    monkeypatch: pytest.MonkeyPatch,
    is_reached: bool,
    config: Config,
    devices: Any,
    nodes: Any,
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setattr(LATE, "has_reach", is_reached)
    size = 2 if nodes is None else len(nodes)
    paths = run(size, lambda comm: comm.paths(LATE), config=config, devices=devices, nodes=nodes)
    assert paths == [expected] * size


class StandIn(Path):
    """An available stand-in for the NCCL path, which records its calls."""

    name, takes_devices = "nccl", True

    def refusal(self, context: Any, verb: Any, call: Any) -> str:
        return ""

    def compile(self, context: Any, verb: Any, call: Any) -> Any:
        def run(x: Any, target: Any) -> None:
            LATE.kernels.fill(target, context.group.size)
            used_calls.append(verb.name)

        return MessageCall(context.group, call.text, run)


used_calls: list[str] = []


@pytest.mark.parametrize(
    ("nodes", "timed", "by_nccl"),
    [
        (None, False, False),
        ([0, 0, 1, 1], False, True),
        ([0, 1], False, True),
        ([0, 0, 1, 1], True, False),
    ],
    ids=["a node", "nodes of several", "nodes of one", "measured"],
)
def test_nccl_comes_first_between_nodes_without_measurements(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, timed: bool, by_nccl: bool
) -> None:
    """Paths on rails were preferred to NCCL, though they had never run on several GPUs."""
    paths = tuple(StandIn() if path.name == "nccl" else path for path in call_table.PATHS)
    monkeypatch.setattr(call_table, "PATHS", paths)
    used_calls.clear()

    def rank(comm: Communicator) -> None:
        if timed:
            comm.runtime.chooser = chooser(time("hierarchical", 1e-6), time("nccl", 2e-6), nodes=2)
        summed(comm)

    size = 2 if nodes is None else len(nodes)
    run(size, rank, nodes=nodes)
    assert used_calls == ["all_reduce"] * size * by_nccl


def test_measured_times_decide(copies: list[int]) -> None:
    """Small arrays go through the host, large ones between devices, and still larger ones by the default order."""
    small, large = 1 << 12, 1 << 16

    def rank(comm: Communicator) -> list[int]:
        comm.runtime.chooser = chooser(
            time("host", 1e-6, small), time("node", 2e-6, small), time("node", 1e-6, large), time("host", 2e-6, large)
        )
        results = []
        for nbytes in (small, large, 4 * large):
            comm.barrier()
            before = len(copies)
            summed(comm, nbytes // 4)
            comm.barrier()
            results.append(len(copies) - before)
        return results

    for of_small, of_large, beyond in run(2, rank):
        assert of_small > 0
        assert of_large == beyond == 0


def test_a_call_can_name_its_path(copies: list[int]) -> None:
    def rank(comm: Communicator) -> tuple[int, int]:
        comm.runtime.chooser = chooser(time("host", 1e-6), time("node", 2e-6))
        summed(comm, algorithm="node")
        comm.barrier()
        between = len(copies)
        comm.barrier()
        summed(comm, algorithm="host")
        comm.barrier()
        return between, len(copies)

    for between, by_host in run(2, rank):
        assert between == 0 < by_host


def test_the_fastest_message_algorithm_is_used(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A native algorithm that cannot do this call is skipped: there is no MPI."""

    def rank(comm: Communicator) -> None:
        comm.runtime.chooser = chooser(time("native", 1e-7), time("ring", 1e-6), time("node", 2e-6), time("host", 1))
        executed: list[str] = []
        execute = comm.group.programs.execute

        def noting(program: Any, *arguments: Any, **options: Any) -> Any:
            executed.append(program.algorithm)
            return execute(program, *arguments, **options)

        monkeypatch.setattr(comm.group.programs, "execute", noting)
        summed(comm)
        assert executed == ["ring"]

    run(2, rank, devices=["late"])
    assert not copies


def test_measured_paths_that_are_unavailable_are_skipped(copies: list[int]) -> None:
    """A table is for a cluster; this job has no GPU per rank, and MPI does not accept GPU memory."""

    def rank(comm: Communicator) -> None:
        comm.runtime.chooser = chooser(time("ring", 1e-7), time("nccl", 1e-6), time("node", 2e-6), time("host", 1))
        summed(comm)

    run(2, rank)
    assert not copies


def test_an_unavailable_path_is_refused_by_name() -> None:
    def rank(comm: Communicator) -> None:
        for name, why in (
            ("messages", "all_reduce: algorithm 'messages': late: MPI does not accept memory of this device"),
            ("nccl", "all_reduce: algorithm 'nccl': it supports only arrays on a GPU"),
            ("rings", "all_reduce has no algorithm 'rings'"),
        ):
            with pytest.raises(UsageError, match=why):
                summed(comm, algorithm=name)
        with pytest.raises(UsageError, match="all_reduce has no algorithm 'host'"):
            comm.all_reduce(np.ones(3, np.float32), algorithm="host")
        with pytest.raises(UsageError, match="needs a device of kind 'lte', but this rank has none"):
            comm.paths("lte")
        summed(comm)  # and the group stays usable

    run(2, rank, config=Config(timeout=10, device_peers=False))


def test_naming_different_paths_is_an_error() -> None:
    def rank(comm: Communicator) -> None:
        summed(comm)
        with pytest.raises(MismatchError, match="algorithm=node"):
            summed(comm, algorithm=("host", "node")[comm.rank])

    run(2, rank)


@pytest.mark.parametrize(
    ("devices", "nodes", "paths"),
    [((), None, {"node", "host"}), (("late",), None, {"node", "ring", "host"}), ((), [0, 0, 1, 1], {"hierarchical"})],
)
def test_paths_are_measured(monkeypatch: pytest.MonkeyPatch, devices: Any, nodes: Any, paths: set[str]) -> None:
    """All ranks get the same table; a call takes the winner of its verb."""
    monkeypatch.setattr(measure, "DEVICE_SIZES", (1024, 4096))
    monkeypatch.setattr(stopwatch, "MOST_REPETITIONS", 1)

    def rank(comm: Communicator) -> Table:
        table = measure.measure_on(comm, LATE, 1000.0)
        comm.runtime.chooser = Chooser(table=table)
        summed(comm, 1000)
        return table

    size = 2 if nodes is None else 4
    first, *others = run(size, rank, devices=devices, nodes=nodes)
    assert all(other == first for other in others)
    assert not first.machines
    assert {(e.verb, e.nodes, e.ranks_per_node, e.device) for e in first.entries} == {
        (verb, 1 if nodes is None else 2, 2, "late") for verb in measure.VERBS
    }
    for entry in first.entries:
        assert {t.up_to for t in entry.times} == {2048, 8192}
        assert "native" not in {t.algorithm for t in entry.times}  # there is no MPI
        if entry.verb == "all_reduce":
            assert {t.algorithm for t in entry.times} >= paths


def test_an_asynchronous_call_notices_a_rank_that_left() -> None:
    """Its wait for the other ranks was watched like a copy: without comparisons, it ended only by the timeout."""
    over = threading.Event()

    def rank(comm: Communicator) -> None:
        x = LATE.empty((1 << 15,))  # so large that the ranks compare where it is
        LATE.kernels.fill(LATE.wrap(x, "x"), 1)
        comm.all_reduce(x, out=x)
        comm.barrier()
        if comm.rank:
            comm.group.leave("has left")
            over.wait(10)
            return
        try:
            with pytest.raises(PeerError, match="rank 1 has left"):
                comm.all_reduce_async(x, out=x).wait()
        finally:
            over.set()

    run(2, rank, config=Config(timeout=10, device_slot_kib=64, check="never"))
