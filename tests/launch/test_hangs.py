"""Hangs: a job reports the reason within twice the set time, and continues if it was only slow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commlib.observe.hang_folder import find_hangs

AFTER = 1.5  # seconds; of the tests whose ranks have little to do before

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import commlib

x = np.ones(4, "float32")

def until_told(*words):
    while not any(all(word in told for word in words) for told in map(Path.read_text, Path().glob("hangs/*/*/d*.txt"))):
        time.sleep(0.05)

def print_error(call, *arguments):
    try:
        call(*arguments)
    except commlib.CommlibError as error:
        print(f"{type(error).__name__}\\n", end="", flush=True)
"""


def environment(**more):
    return {"COMMLIB_HANG_AFTER": str(AFTER), "COMMLIB_HANG_FOLDER": "hangs", **more}


def diagnoses(folder):
    """Return the diagnoses of the hangs in a folder. All ranks must be notified within twice the set time."""
    texts = []
    for hang in find_hangs(folder):
        path = hang.path / "diagnosis.txt"
        dumps = hang.read()
        waits = [wait.seconds for dump in dumps for wait in dump.waits]
        lasted = max(waits + [name.seconds for dump in dumps for name in dump.named])
        began = min(dump.time for dump in dumps) - lasted
        assert lasted > AFTER and path.stat().st_mtime - began < 2 * AFTER + 1e-3 * len(dumps)
        texts.append(path.read_text())
    return texts


@pytest.mark.any_mpi
def test_late_and_stopped_ranks_are_named_and_the_job_continues(mpirun, tmp_path):
    """Rank 1 makes a call once it is reported missing, is stopped, and sends once rank 0 is reported to wait for it.

    At the end, rank 0 waits for two things: a work that it has started, and a message.
    """
    done = mpirun(
        2,
        HEAD
        + """
comm = commlib.init()

def load_data():
    until_told("(call 3)")

def evaluate():
    until_told("recv on channel 'edge'", "all_reduce of 50000 x float32")

comm.all_reduce(x)
processes = comm.all_gather_object(os.getpid())
if comm.rank == 1:
    load_data()
comm.all_reduce(x)

if comm.rank == 0:
    os.kill(processes[1], signal.SIGSTOP)
    while Path(f"/proc/{processes[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)

    def revive():
        until_told("rank 1 is stopped")
        os.kill(processes[1], signal.SIGCONT)

    threading.Thread(target=revive).start()
else:
    time.sleep(0.2)  # in which it is stopped
comm.barrier()

channel = comm.channel(1 - comm.rank, "edge", (4,))
if comm.rank == 1:
    evaluate()
work = comm.all_reduce_async(np.ones(50000, "float32"))
if comm.rank == 1:
    channel.send(x)
else:
    channel.recv()
work.wait()
commlib.shutdown()
print("well\\n", end="")
""",
        env=environment(),
    )
    assert done.returncode == 0 and done.stdout.count("well") == 2, done.stderr
    late, stopped, two = diagnoses(tmp_path / "hangs")
    call = r"all_reduce of 4 x float32, op=sum, algorithm=auto \(call 3\)"
    assert re.search(
        rf"rank 1 is missing in world: {call}, where rank 0 waits; it is at .*\d+ in until_told: ", late
    ), late
    assert re.search(
        rf"rank 0: waits in world: {call}\n    at .*program_0.py:\d+ in <module>: comm.all_reduce\(x\)", late
    )
    assert re.search(r"rank 1 is stopped \(process \d+ on .*\): by SIGSTOP", stopped), stopped
    assert re.search(r"rank 0: waits in world: barrier \(call 4\)\n    at .*: comm.barrier\(\)", stopped), stopped
    assert re.search(r"rank 1 is missing in world: .*, where rank 0 waits", two), two
    assert "recv on channel 'edge' with rank 1" in two and "all_reduce of 50000 x float32" in two
    assert len(re.findall(r"continues: hang [123] has ended", done.stderr)) >= 2, done.stderr
    dump = find_hangs(tmp_path / "hangs")[0].read()[1]
    (world,) = dump.groups
    assert [call.verb for call in world.operations] == ["all_reduce", "all_gather_object"] and world.calls == 2
    assert [(call.sequence, call.nbytes, call.state) for call in world.operations[:1]] == [(1, 16, "ended")]
    place = dump.threads[0].place
    assert place is not None and place.function == "until_told" and not dump.threads[0].inside


@pytest.mark.any_mpi
def test_cycles_and_different_calls_are_named_without_comparison(mpirun, tmp_path):
    """By messages, so that no rank sees where the other one is."""
    done = mpirun(
        2,
        HEAD
        + """
comm = commlib.init()
first, second = comm.split(0, name="first"), comm.split(0, name="second")

def both(one, other):
    one.all_reduce(x)
    other.all_reduce(x)

print_error(both, *((first, second) if comm.rank == 0 else (second, first)))
comm.barrier()
print_error(comm.all_reduce, x if comm.rank == 0 else np.ones(5, "float32"))
""",
        env=environment(COMMLIB_CHECK="never", COMMLIB_NODE_PATH="0", COMMLIB_TIMEOUT="3.2"),
    )
    assert done.stdout.count("StallError") == 4, done.stdout + done.stderr
    circle, sizes = diagnoses(tmp_path / "hangs")
    assert "deadlock of ranks 0-1: each waits for the next one" in circle
    for rank, group in enumerate(("first", "second")):
        line = rf"rank {rank} waits for rank {1 - rank} in {group}: all_reduce .*\(call 1\)\n +at .* in both: one"
        assert re.search(line, circle), circle
    assert re.search(
        r"world: call \d+ is not the same on all ranks: one skipped a call or passed other arguments", sizes
    )
    for rank, count in enumerate((4, 5)):
        assert f"    rank {rank}: all_reduce of {count} x float32" in sizes, sizes
    printed = subprocess.run(
        [sys.executable, "-m", "commlib", "trace", "hang", str(tmp_path / "hangs")], capture_output=True, text=True
    )
    assert printed.stdout.startswith(sizes) and "earlier hangs: " in printed.stdout, printed.stderr
    assert sizes.splitlines()[1] in done.stderr and circle.splitlines()[1] in done.stderr
    whole = [sys.executable, "-m", "commlib", "trace", "hang", str(tmp_path / "hangs"), "--json", "--rank", "1"]
    report = json.loads(subprocess.run(whole, capture_output=True, text=True, check=True).stdout)
    assert report["findings"][0]["kind"] == "mismatch" and report["dump"]["rank"] == 1


@pytest.mark.any_mpi
def test_named_operations_and_an_unwritable_folder(mpirun, tmp_path):
    """Twice in a process; the second time the folder is a file, which is reported, and the job continues.

    A forked child notifies nobody.
    """
    done = mpirun(
        2,
        HEAD
        + """
from commlib import horovod as hvd

hvd.init()
hvd.start_allreduce([x], [x.copy()], "v", op=hvd.Sum).wait()
if os.fork() == 0:
    time.sleep(2)
    os._exit(0)
if hvd.rank() == 1:
    until_told("allreduce 'w'")
hvd.start_allreduce([x], [x.copy()], "w", op=hvd.Sum).wait()
hvd.shutdown()

os.environ.update(COMMLIB_HANG_FOLDER=__file__, COMMLIB_HANG_AFTER="0.5")
comm = commlib.init()
if comm.rank == 1:
    time.sleep(1)
comm.barrier()
os.wait()
print("well\\n", end="")
""",
        env=environment(),
    )
    assert done.returncode == 0 and done.stdout.count("well") == 2, done.stderr
    (report,) = diagnoses(tmp_path / "hangs")
    named = r"rank 1 is missing in process set 0: allreduce 'w', where rank 0 waits; it is at .* in until_told"
    assert re.search(named, report) and "uint64" not in report, report
    (process_set,) = (group for group in find_hangs(tmp_path / "hangs")[0].read()[0].groups if group.name != "world")
    assert process_set.name == "process set 0"
    operations = [(operation.text, operation.state) for operation in process_set.operations]
    assert operations == [("allreduce 'v'", "ended"), ("allreduce 'w'", "queued")]
    assert done.stderr.count("hang diagnosis is off on rank") == 1, done.stderr
    assert re.search(r"diagnosis is off on rank 0: .*COMMLIB_HANG_FOLDER is .*program_0\.py", done.stderr), done.stderr


@pytest.mark.any_mpi
def test_the_warning_of_a_long_wait_names_the_diagnosis_command(mpirun, tmp_path):
    """Without it, users waited four minutes more for the diagnosis. The job continues."""
    done = mpirun(
        2,
        HEAD
        + """
import subprocess
comm = commlib.init()
comm.all_reduce(x)

def load_data():
    for name in (comm.runtime.token, str(os.getpid()), str(os.getppid())):
        command = [sys.executable, "-m", "commlib", "trace", "hang", "--now", name]
        done = subprocess.run(command, capture_output=True, text=True)
        sys.stdout.write(done.stdout + done.stderr)
        sys.stdout.flush()

if comm.rank == 1:
    load_data()
comm.all_reduce(x)
if comm.rank == 1:
    print("token", comm.runtime.token)
""",
        env={"COMMLIB_STALL_WARNING": "0.5"},
    )
    assert done.returncode == 0, done.stderr
    (token,) = re.findall("token (.*)", done.stdout)
    line = (
        r"rank 0 has waited 1 s; not arrived: rank 1; the diagnosis comes in 29\d s \(COMMLIB_HANG_AFTER\), or at once"
    )
    assert re.search(f"{line}: commlib trace hang --now {token}\n", done.stderr), done.stderr
    assert done.stdout.count("the job now: its longest wait has lasted ") == 3, done.stdout
    place = r"all_reduce of 4 x .* \(call 2\), where rank 0 waits; it is at .* in load_data: done ="
    assert len(re.findall(f"rank 1 is missing in world: {place}", done.stdout)) == 3, done.stdout
    assert not (tmp_path / "commlib-hangs").exists()
    assert not list(Path("/dev/shm").glob(f"commlib-job-{token}-*"))
