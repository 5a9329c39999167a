"""Forked children: they report that they are children, communicate with no rank, and end without disturbing the job."""

from __future__ import annotations

import pytest

HEAD = """
import os, sys, time
import numpy as np
import commlib
comm = commlib.init()
x = np.ones(3)
large = comm.empty(100_000)

def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.mark.any_mpi
def test_every_call_in_a_child_is_refused_as_a_childs(mpirun):
    """A child's all_reduce was paired with that of the peer."""
    done = mpirun(
        2,
        HEAD
        + """
group = comm.split(0)
for _ in range(2):
    comm.all_reduce(x), comm.all_reduce(large, out=large), comm.all_reduce(x, algorithm="ring"), comm.all_gather(x)
plan = comm.plan_all_reduce(large, out=large)
plan()
received, started = comm.recv_async(np.zeros(3), 1 - comm.rank, tag=9), comm.all_reduce_async(np.ones(200_000))
calls = {
    "small": lambda: comm.all_reduce(x), "large": lambda: comm.all_reduce(large, out=large),
    "ring": lambda: comm.all_reduce(x, algorithm="ring"), "gather": lambda: comm.all_gather(x),
    "plan": plan, "plan.start": plan.start, "async": lambda: comm.all_reduce_async(x), "barrier": comm.barrier,
    "send": lambda: comm.send(x, 0), "recv": lambda: comm.recv(x, 0), "pending": received.wait,
    "group": group.barrier, "split": lambda: comm.split(0), "empty": lambda: comm.empty(3), "close": group.close,
    "object": lambda: comm.all_gather_object(1), "init": commlib.init,
}
child = os.fork()
if child == 0:
    for name, call in calls.items():
        errors = []
        for _ in range(2):
            try:
                call()
            except commlib.UsageError as error:
                assert f"process {os.getpid()} was forked by process {os.getppid()}" in str(error), error
                errors.append(error)
        assert len(errors) == 2 and errors[0] is not errors[1], name
    assert commlib.world().rank == comm.rank and not received.done()
    commlib.shutdown()
    os._exit(4)
assert end_of(child) == 4
started.wait()
comm.send(x, 1 - comm.rank, tag=9)
assert received.wait().sum() == 3
for _ in range(100):
    assert comm.all_reduce(x)[0] == group.all_reduce(x)[0] == 2
print("well", flush=True)
""",
    )
    assert (done.returncode, done.stdout) == (0, "well\nwell\n"), done.stderr


def test_a_childs_end_is_not_its_parents(mpirun):
    """It notified the others that the parent had left; and MPI_Finalize in a child waited for ever."""
    done = mpirun(
        2,
        HEAD
        + """
for end in ("run out", "exit", "raise"):
    child = os.fork()
    if child == 0:
        if end == "raise":
            raise ValueError("only a child")
        sys.exit(5 if end == "exit" else 0)
    assert end_of(child) == {"run out": 0, "exit": 5, "raise": 1}[end]
    time.sleep(0.2)
    assert comm.all_reduce(x)[0] == 2
print("well", flush=True)
""",
    )
    assert (done.returncode, done.stdout) == (0, "well\nwell\n"), done.stderr
    assert done.stderr.count("ValueError: only a child") == 2 and "aborting" not in done.stderr


def test_children_of_multiprocessing_work_while_threads_hold_locks(mpirun):
    done = mpirun(
        2,
        HEAD
        + """
import multiprocessing, threading

def work(number):
    np.zeros(100).sum()
    return number * comm.rank, commlib.world().size

ended = threading.Event()
def reduce():
    group = groups[0]
    while not group.all_reduce(np.array([float(ended.is_set())]))[0] == 2:
        group.all_reduce_async(np.ones(50_000)).wait()

groups = [comm.split(0)]
thread = threading.Thread(target=reduce)
thread.start()
for _ in range(5):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(work, range(8)) == [(number * comm.rank, 2) for number in range(8)]
ended.set()
thread.join()
print("well", flush=True)
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\nwell\n", "")


@pytest.mark.any_mpi
def test_named_operations_of_a_child(mpirun):
    done = mpirun(
        2,
        HEAD
        + """
from commlib import horovod as hvd
hvd.init()

def reduce(name):
    array = np.ones(3)
    hvd.start_allreduce([array], [array], name, op=hvd.Sum).wait()
    return array[0]

assert reduce("a") == reduce("a") == 2
ones = np.ones(3)
pending = hvd.start_allreduce([ones], [ones], "b", op=hvd.Sum)
child = os.fork()
if child == 0:
    for call in (lambda: reduce("a"), lambda: reduce("c"), pending.wait, hvd.init, lambda: hvd.start_barrier().wait()):
        try:
            call()
        except commlib.UsageError as error:
            assert "was forked by process" in str(error), error
        else:
            raise AssertionError
    os._exit(hvd.rank() + 1)
assert end_of(child) == comm.rank + 1
pending.wait()
assert reduce("c") == 2
print("well", flush=True)
""",
    )
    assert (done.returncode, done.stdout) == (0, "well\nwell\n"), done.stderr


@pytest.mark.any_mpi
def test_workers_of_a_data_loader(mpirun):
    """The parent reports a worker's uncaught error; the workers end, and print nothing about MPI."""
    pytest.importorskip("torch")
    done = mpirun(
        2,
        """
import torch
from torch.utils.data import DataLoader, Dataset
import commlib_torch as hvd
hvd.init()

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == bad:
            raise ValueError("bad sample")
        return torch.tensor([float(index * hvd.size())])

reduced = hvd.allreduce(torch.ones(3), op=hvd.Sum)
bad = -1
for _ in range(2):
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    sums = [float(hvd.allreduce(batch, op=hvd.Sum).sum()) for batch in loader]
    assert sums == [4, 20, 36, 52], sums
bad = 5
try:
    list(DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork"))
except ValueError as error:
    assert "bad sample" in str(error)
hvd.barrier()
print("well", flush=True)
""",
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\nwell\n", "")
