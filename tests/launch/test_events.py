"""Recording from the start, by settings."""

from __future__ import annotations

import json

import pytest

HEAD = """
import numpy as np
import commlib
"""


@pytest.mark.any_mpi
def test_settings_record_from_the_start(mpirun, tmp_path):
    done = mpirun(
        2,
        HEAD
        + """
comm = commlib.init()
comm.all_reduce(np.ones(3))
assert comm.stats()["all_reduce"].calls == 1 and len(commlib.recorded()) <= 50
commlib.shutdown()
print("fine")
""",
        env={"COMMLIB_EVENTS": "50", "COMMLIB_TIMELINE": str(tmp_path / "trace{rank}.json")},
    )
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stderr
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())
        assert [event["name"] for event in events if event["ph"] == "B"] == ["all_reduce"]
        assert events[-1]["args"] == {"name": f"rank {rank}"}


def test_a_trace_is_complete_without_shutdown_and_by_default_rank_0s(mpirun, tmp_path):
    done = mpirun(
        2,
        HEAD + "comm = commlib.init()\ncomm.barrier()\n",
        env={"COMMLIB_TIMELINE": str(tmp_path / "trace.json")},
    )
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event["ph"] == "B"] == ["barrier"]
    assert {event["pid"] for event in events} == {0}


@pytest.mark.any_mpi
def test_a_trace_that_one_rank_cannot_write_fails_on_all(mpirun, tmp_path):
    """Otherwise the others would wait in `init` for ever."""
    (tmp_path / "trace0.json").mkdir()
    done = mpirun(
        2,
        HEAD
        + """
try:
    commlib.init()
except commlib.UsageError as error:
    print(f"refused: {error}")
""",
        env={"COMMLIB_TIMELINE": str(tmp_path / "trace{rank}.json")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused: ") == 2 and done.stdout.count("(rank 0)") == 2, done.stdout


@pytest.mark.any_mpi
def test_commlibs_setting_wins_over_horovods(mpirun, tmp_path):
    done = mpirun(
        1,
        HEAD
        + """
from commlib import horovod as hvd
hvd.init()
commlib.world().barrier()
hvd.shutdown()
""",
        env={"COMMLIB_TIMELINE": str(tmp_path / "own.json"), "HOROVOD_TIMELINE": str(tmp_path / "theirs.json")},
    )
    assert done.returncode == 0, done.stderr
    assert "barrier" in (tmp_path / "own.json").read_text() and not (tmp_path / "theirs.json").exists()


@pytest.mark.any_mpi
def test_a_forked_child_leaves_the_trace_alone(mpirun, tmp_path):
    done = mpirun(
        1,
        HEAD
        + """
import os, time
comm = commlib.init()
comm.barrier()
child = os.fork()
if child == 0:
    try:
        comm.barrier()
    except commlib.UsageError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
comm.all_reduce(np.ones(1))
commlib.shutdown()
print("fine")
""",
        env={"COMMLIB_TIMELINE": str(tmp_path / "trace.json")},
    )
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event["ph"] == "B"] == ["barrier", "all_reduce"]
