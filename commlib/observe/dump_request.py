"""Dump request: find a running job by its name, folder or process, and make its ranks dump their state now.

A request is a folder `now-N`, in the job's node folder and, if it has several hosts, in its folder of hangs: the ranks
look for both, and dump into the second one, or into the first if all of them are on this host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commlib.config.settings import Config
from commlib.errors import UsageError
from commlib.observe.dump import Dump
from commlib.observe.hang_folder import HangFolder
from commlib.observe.node_folder import NodeFolder, RankRecord, node_folders, owner_of, parent_of, state_of

_LOOK = 0.1  # seconds
_ENDED = ("", "T", "t", "Z", "X")  # states of processes that write nothing


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A running job. node: its folder on this host, None without ranks here. hangs: its folder of hangs."""

    token: str
    node: NodeFolder | None
    hangs: Path
    is_alone: bool = False

    @property
    def dumps(self) -> Path:
        """The folder in which the dumps of requests appear."""
        return self.node.path if self.node is not None and self.is_alone else self.hangs


def find_job(name: str | None) -> RunningJob:
    """Return the job with a name: its token, its folder, or the process of a rank or its launcher; None: the only one.

    Raises UsageError if there is none, if it has ended, or if it belongs to another user.
    """
    if name is None:
        return _only_job()
    if (folder := _node_folder(name)) is not None:
        return _job(folder)
    if Path(name).is_dir():
        return _job_of_folder(Path(name))
    if name.isdecimal():
        return _job_of_process(int(name))
    raise UsageError(f"no job {name!r} runs on this host ({_running()}){_trace_of(name)}")


def request_dumps(job: RunningJob, seconds: float) -> tuple[HangFolder, list[Dump]]:
    """Make the ranks of a job dump their state; return the dumps that appear in time. The job keeps running.

    Raises UsageError if no rank answers.
    """
    number = 1 + max([0, *(numbers_in(job.dumps)), *(() if job.node is None else numbers_in(job.node.path))])
    folder = HangFolder(request_path(job.dumps, number))
    try:
        folder.create()
        if job.node is not None:
            request_path(job.node.path, number).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"job {job.token}: cannot send a request to its ranks: {error}") from None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (dumps := folder.read()) and _are_complete(dumps):
            break
        if job.node is not None and not job.node.is_running:
            break
        time.sleep(_LOOK)
    if dumps := folder.read():
        return folder, dumps
    ended = job.node is not None and not job.node.is_running
    why = "it has ended" if ended else "has it ended, or do its hosts not see this folder?"
    raise UsageError(f"job {job.token}: no rank has written to {folder.path} in {seconds:g} s: {why}")


def request_path(folder: Path, number: int) -> Path:
    """Return the folder of one request."""
    return folder / f"now-{number}"


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the requests in a folder, ascending."""
    try:
        names = [name.removeprefix("now-") for name in os.listdir(folder) if name.startswith("now-")]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def _are_complete(dumps: Sequence[Dump]) -> bool:
    """Return whether all ranks have written that can: a neighbour saw the others stopped or ended."""
    written = {dump.rank for dump in dumps}
    lost = {state.rank for dump in dumps for state in dump.neighbours if state.state in _ENDED}
    return written | lost >= set(range(dumps[0].size))


def _node_folder(name: str) -> NodeFolder | None:
    token = Path(name).name.removeprefix("job-")
    return next((folder for folder in node_folders() if folder.token == token), None)


def _job(folder: NodeFolder) -> RunningJob:
    if os.geteuid() not in (0, folder.path.stat().st_uid):
        raise UsageError(f"job {folder.token} belongs to {owner_of(folder.path)}: only that user can request its dumps")
    ranks = folder.ranks()
    alive = [record for record in ranks if record.is_alive]
    if not alive:
        raise UsageError(f"job {folder.token} has ended{_earlier(ranks)}")
    return RunningJob(folder.token, folder, Path(alive[0].hangs) / f"job-{folder.token}", alive[0].is_alone)


def _earlier(ranks: Sequence[RankRecord]) -> str:
    if ranks and Path(ranks[0].hangs).is_dir():
        return f"; its earlier hangs: commlib trace hang {ranks[0].hangs}"
    return ""


def _job_of_folder(path: Path) -> RunningJob:
    """Return the job of a folder of hangs, whose ranks may be on other hosts."""
    jobs = [path] if path.name.startswith("job-") else sorted(path.glob("job-*"), key=lambda each: each.stat().st_mtime)
    here = [folder for each in jobs if (folder := _node_folder(each.name)) is not None and folder.is_running]
    if here:
        return _job(here[-1])
    if not jobs:
        raise UsageError(
            f"{path} has no folder of a job (job-TOKEN): pass the one that the warning of a long wait names"
        )
    if not os.access(jobs[-1], os.W_OK):
        raise UsageError(f"{jobs[-1]} belongs to {owner_of(jobs[-1])}: only that user can request its dumps")
    return RunningJob(jobs[-1].name.removeprefix("job-"), None, jobs[-1].absolute())


def _job_of_process(process: int) -> RunningJob:
    for folder in node_folders():
        for record in folder.ranks():
            if record.is_alive and process in _line_of(record.process):
                return _job(folder)
    if not state_of(process):
        raise UsageError(
            f"no job and no process {process} on this host ({_running()}): has it ended, or is it elsewhere?"
        )
    owner = Path(f"/proc/{process}").stat().st_uid
    whose = "" if owner == os.geteuid() else f" of {owner_of(Path(f'/proc/{process}'))}"
    raise UsageError(
        f"process {process}{whose} is neither a rank of a job of several ranks after commlib.init, nor the launcher of "
        f"one ({_running()})"
    )


def _line_of(process: int) -> list[int]:
    """Return a process, its parent, and so on: one of them is the launcher."""
    lines = []
    while process > 1:
        lines.append(process)
        process = parent_of(process)
    return lines


def _only_job() -> RunningJob:
    jobs = _own_jobs()
    if len(jobs) != 1:
        raise UsageError(f"name the job ({_running()}): commlib trace hang --now JOB")
    return _job(jobs[0])


def _own_jobs() -> list[NodeFolder]:
    own = [folder for folder in node_folders() if folder.path.stat().st_uid == os.geteuid()]
    return [folder for folder in own if folder.is_running]


def _running() -> str:
    """Describe the jobs of this user on this host."""
    texts = []
    for folder in _own_jobs():
        ranks = folder.ranks()
        texts.append(f"{folder.token}: {ranks[0].size} ranks, process {ranks[0].process}")
    return f"running here: {'; '.join(texts)}" if texts else "none of yours runs here"


def _trace_of(name: str) -> str:
    """Return a hint if a folder of the usual place shows that the job has run."""
    token = Path(name).name.removeprefix("job-")
    past = Path(Config().hang_folder) / f"job-{token}"
    if past.is_dir():
        return f": it has ended, or runs on other hosts (then pass {past}). Its hangs so far: commlib trace hang {past}"
    return ": has it ended, or is it on another host?"
