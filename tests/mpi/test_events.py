"""Events that operations record under MPI: collectives of every kind, messages, and named operations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import commlib
from commlib import horovod as hvd
from commlib.errors import MismatchError, UsageError
from commlib.observe import Phase
from tests.bodies.every_verb import calls, check_one_call, phases

pytestmark = pytest.mark.any_ranks

pair = pytest.mark.ranks(min=2)


@pytest.fixture(autouse=True)
def _stopped(comm: Any) -> Any:
    yield
    commlib.stop_recording()


def recorded_calls(comm: Any) -> None:
    for verb, way, call in calls(comm):
        number = comm.group.call_number + 1
        commlib.start_recording(10_000)
        call()
        commlib.stop_recording()
        events = commlib.recorded()
        check_one_call(comm, events, verb, way, number)
        assert comm.stats()[verb].calls == 1 == commlib.statistics()[comm.group.name, verb].calls
        call()
        assert commlib.recorded() == events


def test_every_verb_in_every_way(comm: Any) -> None:
    recorded_calls(comm)


def test_every_verb_by_messages(comm: Any) -> None:
    """The same where ranks share no memory, as between nodes, and by MPI's own all-reduce."""
    from commlib.communicator import Communicator
    from commlib.config.settings import Config
    from commlib.runtime.process import Runtime
    from commlib.transport.mpi import MpiTransport

    runtime = Runtime(Config(node_path=False))
    group = Communicator(MpiTransport(comm.native.Dup()), runtime, "by messages")
    for verb, way, call in calls(group):
        number = group.group.call_number + 1
        runtime.recording.start(10_000)
        call()
        runtime.recording.stop()
        check_one_call(group, runtime.recording.events(), verb, way, number)
    if comm.size > 1:
        runtime.recording.start()
        group.all_reduce(np.ones(3, np.float32))
        group.all_reduce(np.ones(3, np.float32), algorithm="native")
        (small, native) = phases(runtime.recording.events()).values()
        assert Phase.ROUND in small and native == [Phase.QUEUED, Phase.RUN, Phase.END]
    group.close()


def test_all_ranks_number_calls_alike(comm: Any) -> None:
    commlib.start_recording()
    for _ in range(3):
        comm.barrier()
        comm.all_reduce_async(np.ones(4)).wait()
        comm.all_gather(np.ones(4))
    commlib.stop_recording()
    ends = [(e.verb, e.sequence) for e in commlib.recorded() if e.phase is Phase.END and e.group == comm.name]
    everyone = comm.all_gather_object(ends)
    assert len(ends) == 9 and everyone == [ends] * comm.size


@pair
def test_messages(comm: Any) -> None:
    commlib.start_recording()
    if comm.rank == 0:
        comm.send(np.ones(3), 1, 5)
    elif comm.rank == 1:
        comm.recv_async(np.ones(3), 0, 5).wait()
    commlib.stop_recording()
    operations = [(record.verb, record.nbytes, seen) for record, seen in phases(commlib.recorded()).items()]
    assert operations == [("send" if comm.rank == 0 else "recv", 24, [Phase.RUN, Phase.END])] * (comm.rank < 2)


@pair
def test_the_last_event_holds_the_error(comm: Any) -> None:
    commlib.start_recording()
    with pytest.raises(MismatchError):
        comm.all_reduce(np.ones(3 + comm.rank))
    with pytest.raises(MismatchError):
        comm.all_reduce_async(np.ones(3000 + comm.rank)).wait()
    comm.barrier()
    ends = [event for event in commlib.recorded() if event.phase is Phase.END and event.group == comm.name]
    assert [event.detail.partition(":")[0] for event in ends] == ["MismatchError", "MismatchError", ""]
    assert commlib.statistics()[comm.name, "all_reduce"].failed == 2


def named(comm: Any, name: str, array: Any) -> Any:
    return hvd.start_allreduce([array], [np.empty_like(array)], name, op=hvd.Sum)


def test_named_operations(comm: Any) -> None:
    hvd.init()
    commlib.start_recording()
    for work in [named(comm, f"grad{number}", np.ones(number + 1)) for number in range(4)]:
        work.wait()
    hvd.start_barrier().wait()
    if comm.size > 1:
        with pytest.raises(MismatchError):
            named(comm, "bad", np.ones(2 + comm.rank)).wait()
    commlib.stop_recording()
    operations = {record.name: (record, seen) for record, seen in phases(commlib.recorded()).items() if record.name}
    assert {name for name in operations if "grad" in name} == {f"grad{number}" for number in range(4)}
    for number in range(4):
        record, seen = operations[f"grad{number}"]
        assert (record.group, record.verb, record.nbytes) == ("process set 0", "allreduce", 8 * (number + 1))
        rounds = [Phase.ROUND] * (3 if Phase.ROUND in seen else 0)  # packed, reduced and unpacked together with others
        assert seen == [Phase.QUEUED, Phase.RUN, *rounds, Phase.END] and record.sequence
    numbers = [(name, record.sequence) for name, (record, _) in sorted(operations.items())]
    assert comm.all_gather_object(numbers) == [numbers] * comm.size
    assert len({number for _, number in numbers if number}) == 5
    if comm.size > 1:
        record, seen = operations["bad"]
        assert seen == [Phase.QUEUED, Phase.END] and record.error.startswith("MismatchError: ")
    counts = commlib.statistics()
    assert counts["process set 0", "allreduce"].calls == 4 + (comm.size > 1)
    assert counts["process set 0", "barrier"].calls == 1


def test_a_trace_has_rows_for_groups_and_names(comm: Any, tmp_path: Any) -> None:
    hvd.init()
    path = tmp_path / f"trace{comm.rank}.json"
    hvd.start_timeline(str(tmp_path / "trace{rank}.json"))
    with pytest.raises(UsageError, match="being written already"):
        hvd.start_timeline("{rank}")
    if comm.rank == 0:
        with pytest.raises(UsageError, match="being written already"):
            commlib.timeline(str(tmp_path / "other.json"))
    assert not hasattr(commlib, "start_timeline")  # once in commlib's words, once in those of Horovod's API in hvd
    comm.all_reduce(np.ones(3))
    comm.all_gather_async(np.ones(30)).wait()
    named(comm, "traced", np.ones(3)).wait()
    comm.barrier()
    hvd.stop_timeline()
    comm.broadcast(np.ones(3))
    events = json.loads(path.read_text())
    rows = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    of_world = [event["name"] for event in events if event.get("tid") == rows["world"] and event["ph"] == "B"]
    assert of_world == ["all_reduce", "all_gather", "barrier"]
    of_name = [(e["ph"], e.get("name")) for e in events if e.get("tid") == rows["traced"] and e["ph"] != "M"]
    within = [("B", "MPI_ALLREDUCE"), ("E", None)]  # as Horovod writes it, alone as fused
    assert of_name == [("B", "NEGOTIATE_ALLREDUCE"), ("E", None), ("B", "ALLREDUCE"), *within, ("E", None)]
    assert {event["pid"] for event in events} == {comm.rank}
