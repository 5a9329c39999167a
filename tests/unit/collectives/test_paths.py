"""The table of paths: which rows accept a call of host or device arrays, in which order, and who refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from commlib.collectives.call import Call
from commlib.collectives.call_table import PATHS
from commlib.collectives.context import PathContext
from commlib.collectives.paths import find_paths
from commlib.collectives.verbs import all_reduce, gather
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.cost.chooser import Chooser
from commlib.cost.records import Entry, MeasuredTime
from commlib.cost.table import Table
from commlib.devices.host import HOST
from commlib.errors import UsageError
from commlib.node.device_board import DeviceBoard
from tests.bodies import loopback
from tests.late import LATE


def rows(
    algorithm: str = "auto",
    *,
    device: Any = LATE,
    nodes: Sequence[int] = (0, 0),
    devices: Sequence[str] = (),
    times: Sequence[str] = (),
    verb: Any = all_reduce.VERB,
    op: str = "sum",
    dtype: str = "float32",
    **settings: Any,
) -> list[tuple[str, str]]:
    """Return the names of the rows for a call, and the algorithm that each is to run."""
    entry = Entry(
        verb.name, len(set(nodes)), 2, "", "any", tuple(MeasuredTime(1 << 20, name, 0, 1.0) for name in times), "late"
    )

    def there(comm: Communicator) -> list[tuple[str, str]]:
        if times:
            comm.runtime.chooser = Chooser(table=Table((entry,)))
        name = "" if device is HOST else device.name
        call = Call(verb.name, 100, np.dtype(dtype), op, algorithm=algorithm, device=name)
        choices = find_paths(PATHS, PathContext(comm.group, device), verb, call)
        return [(choice.path.name, choice.call.algorithm) for choice in choices]

    return loopback.run(len(nodes), there, nodes=nodes, devices=devices, config=Config(timeout=10, **settings))[0]


def names(*arguments: Any, **options: Any) -> list[str]:
    return [name for name, _ in rows(*arguments, **options)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["node", "node", "host"]),  # the second one through host memory
        ({"devices": ["late"]}, ["node", "node", "messages"]),  # staging is never needed
        ({"nodes": (0, 0, 1, 1)}, ["hierarchical", "host"]),
        ({"nodes": (0, 1)}, ["host"]),
        ({"device_peers": False}, ["host"]),
        ({"verb": gather.VERB, "op": "", "nodes": (0, 0, 1, 1)}, ["host"]),
        ({"dtype": "int64", "op": "mean", "devices": ["late"]}, ["host"]),  # the sum may overflow
        ({"device": HOST}, ["node"]),
        ({"device": HOST, "nodes": (0, 0, 1, 1)}, ["hierarchical"]),
        ({"device": HOST, "node_path": False}, ["messages"]),
    ],
)
def test_auto_takes_the_rows_that_accept_the_call(options: dict[str, Any], expected: list[str]) -> None:
    assert names(**options) == expected


@pytest.mark.parametrize(
    ("algorithm", "options", "expected"),
    [
        ("node", {}, ["node", "node", "host"]),
        ("node", {"nodes": (0, 1)}, ["host"]),  # it passes the name on to the paths of the host
        ("ring", {"devices": ["late"]}, ["messages"]),
        ("ring", {}, ["host"]),
        ("host", {"devices": ["late"]}, ["host"]),
        ("ring", {"device": HOST}, ["messages"]),
        ("node", {"device": HOST, "nodes": (0,)}, ["messages"]),  # one rank
    ],
)
def test_a_name_selects_rows(algorithm: str, options: dict[str, Any], expected: list[str]) -> None:
    assert names(algorithm, **options) == expected


def test_measured_times_order_the_rows_of_devices() -> None:
    times = ("native", "double_tree", "host", "node", "ring")  # here is no MPI
    assert rows(times=times, devices=["late"]) == [("messages", "double_tree")]
    assert rows(times=("host", "node")) == [("host", "auto")]
    assert rows(times=("node", "ring"), devices=["late"]) == [("node", "auto"), ("node", "auto"), ("messages", "ring")]
    assert names(times=("host",), device=HOST) == ["node"]


@pytest.mark.parametrize(
    ("algorithm", "options", "why"),
    [
        ("nccl", {"device": HOST}, "algorithm 'nccl': it supports only arrays on a GPU"),
        ("node", {"device": HOST, "nodes": (0, 1)}, "algorithm 'node': world has no shared memory"),
        ("messages", {}, "algorithm 'messages': late: MPI does not accept memory of this device"),
        (
            "messages",
            {"op": "mean", "dtype": "int64"},
            "algorithm 'messages': the mean of int64 is computed on the host",
        ),
        ("native", {"device": HOST}, "algorithm 'native': it needs MPI"),
    ],
)
def test_a_named_path_refuses(algorithm: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"all_reduce: {why}"):
        rows(algorithm, **options)


def test_one_rank_may_name_any_of_its_paths() -> None:
    """A gather on one rank refused "node" as an unknown schedule."""

    def there(comm: Communicator) -> None:
        for algorithm in ("node", "hierarchical"):
            np.testing.assert_array_equal(comm.gather(np.arange(3), algorithm=algorithm), np.arange(3))

    loopback.run(1, there)


def test_boards_of_devices_close_with_their_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were only dropped, and closed when nothing referred to them any more."""
    monkeypatch.setattr(LATE, "has_signals", True)
    closed: list[int] = []
    close = DeviceBoard.close

    def noting(board: DeviceBoard) -> None:
        closed.append(board.rank)
        close(board)

    monkeypatch.setattr(DeviceBoard, "close", noting)

    def there(comm: Communicator) -> None:
        with LATE.using(LATE.stream()):
            total = comm.all_reduce(LATE.put(np.ones(8)))
            assert (total.numpy() == 2).all()
        comm.close()

    loopback.run(2, there)
    assert sorted(closed) == [0, 1]
