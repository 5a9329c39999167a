"""A command finds a running job by its name, folder or process, or reports why not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlib.errors import UsageError
from commlib.observe import node_folder
from commlib.observe.dump import Dump, ProcessState
from commlib.observe.dump_request import find_job, numbers_in, request_dumps, request_path
from commlib.observe.hang_folder import HangFolder
from commlib.observe.node_folder import NodeFolder, RankRecord, own_record, start_of, sweep


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(node_folder, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def other() -> Iterator[int]:
    """Another process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def run(token: str, tmp_path: Path, *, process: int = 0, is_alone: bool = True, rank: int = 0) -> NodeFolder:
    folder, process = NodeFolder.of(token), process or os.getpid()
    folder.join(RankRecord(token, rank, 2, process, start_of(process), str(tmp_path / "hangs"), is_alone))
    return folder


def dump(rank: int, *neighbours: ProcessState) -> Dump:
    return Dump(0, rank, 2, socket.gethostname(), 1, 1e9, 300.0, (), (), (), (), neighbours)


def test_a_job_is_found_by_name_folder_and_process(tmp_path: Path, other: int) -> None:
    node = run("ab12", tmp_path, process=other)
    assert find_job(None).node == node
    for name in ("ab12", "job-ab12", f"{tmp_path}/hangs/job-ab12", str(other)):
        job = find_job(name)
        assert (job.token, job.node, job.dumps) == ("ab12", node, node.path)
    assert find_job(str(os.getppid())).node == node  # as mpirun: a process above


def test_a_job_of_several_hosts_dumps_into_its_folder_of_hangs(tmp_path: Path) -> None:
    run("ab12", tmp_path, is_alone=False)
    assert find_job("ab12").dumps == tmp_path / "hangs" / "job-ab12"


@pytest.mark.parametrize(
    "name, text",
    [
        ("zz", r"no job 'zz' runs on this host \(running here: ab12: 2 ranks, process \d+\): has it ended"),
        ("4194305", "no job and no process 4194305 on this host"),
        ("1", "process 1 is neither a rank of a job of several ranks after commlib.init, nor the launcher"),
        (str(Path(__file__).parent), "has no folder of a job"),
    ],
)
def test_a_name_without_a_job_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    run("ab12", tmp_path)
    with pytest.raises(UsageError, match=text):
        find_job(name)


def test_a_job_must_be_named_if_there_are_several_or_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of yours runs here"):
        find_job(None)
    run("ab12", tmp_path)
    run("cd34", tmp_path)
    with pytest.raises(UsageError, match=r"running here: ab12: 2 ranks, process .*; cd34: 2 ranks"):
        find_job(None)


def test_an_ended_job_is_an_error(tmp_path: Path, shared_memory: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        folder = run("ab12", tmp_path, process=process.pid)
        process.kill()
    (tmp_path / "hangs").mkdir()
    with pytest.raises(UsageError, match=r"job ab12 has ended; its earlier hangs: commlib trace hang .*hangs"):
        find_job("ab12")
    sweep()
    assert not folder.path.exists()
    run("cd34", tmp_path)
    sweep()
    assert [folder.token for folder in node_folder.node_folders()] == ["cd34"]


def test_a_job_of_another_user_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run("ab12", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    with pytest.raises(UsageError, match=r"job ab12 belongs to \w+: only that user can request its dumps"):
        find_job("ab12")
    with pytest.raises(UsageError, match="none of yours runs here"):
        find_job(None)
    with pytest.raises(PermissionError):
        folder.join(own_record("ab12", 1, 2, "", is_alone=True))


def test_all_running_ranks_are_waited_for(tmp_path: Path) -> None:
    node = run("ab12", tmp_path)

    def answer() -> None:
        while not (numbers := numbers_in(node.path)):
            time.sleep(0.01)
        folder = HangFolder(request_path(node.path, numbers[-1]))
        folder.write(dump(0, ProcessState(1, "h", 5, "T")))

    thread = threading.Thread(target=answer)
    thread.start()
    start = time.monotonic()
    folder, dumps = request_dumps(find_job("ab12"), 60)
    thread.join()
    assert [dump.rank for dump in dumps] == [0] and time.monotonic() - start < 30  # rank 1 is stopped
    assert folder.path == node.path / "now-1"


def test_a_rank_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    run("ab12", tmp_path)
    with pytest.raises(UsageError, match=r"job ab12: no rank has written to .*now-1 in 0.2 s: has it ended, or do its"):
        request_dumps(find_job("ab12"), 0.2)


def test_the_last_rank_that_leaves_removes_the_folder(tmp_path: Path) -> None:
    folder = run("ab12", tmp_path)
    run("ab12", tmp_path, rank=1)
    folder.leave(0)
    assert folder.path.is_dir()
    folder.leave(1)
    assert not folder.path.exists()
