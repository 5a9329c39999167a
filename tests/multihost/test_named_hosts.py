"""Named operations between hosts: a rank that exited or gave up is named in the terms of the user's operations."""

from __future__ import annotations

import re
import sys

import pytest

from ci.hosts import Hosts

pytestmark = pytest.mark.any_mpi

PROGRAM = """
import sys, time
import numpy as np
import commlib
from commlib import horovod as hvd

hvd.init()

def start(name):
    return hvd.start_allreduce([np.ones(3)], [np.empty(3)], name, op=hvd.Sum)

start("before").wait()
if hvd.rank() == 3:
    if "left" in sys.argv:
        sys.exit()
    comm = hvd.global_process_set.coordinator("test").comm
    all_reduce = comm.all_reduce

    def fail_in_the_operation(x, op="sum", **options):
        return all_reduce(x, op, **options) if op == "and" else 1 / 0  # "and": the earlier exchange between ranks

    comm.all_reduce = fail_in_the_operation
try:
    start("a").wait()
except (commlib.PeerError, ZeroDivisionError) as error:
    print(f"\\n{type(error).__name__} on {hvd.rank()}: {error}", flush=True)
time.sleep(3)
"""


@pytest.mark.parametrize(
    "how, why",
    [
        ("left", "has shut commlib down or left the program"),
        ("failed", "has given up process set 0: it was interrupted by ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_on_another_host_is_named(tmp_path, how, why):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Hosts(2) as hosts:
        done = hosts.run(
            [sys.executable, str(script), how], 2, timeout=240, env={"COMMLIB_TIMEOUT": "20"}, capture=True
        )
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        prefix = (
            rf"PeerError on {rank}: process set 0: allreduce 'a': rank {rank}: waited for a rank that will not come"
        )
        assert re.search(rf"{prefix}: (.*; )?rank 3 {why}", done.stdout), done.stdout
    assert not re.search(r"uint64|op=and|call number|split\d", done.stdout + done.stderr), done.stdout + done.stderr


def test_gradients_by_name_between_hosts():
    """As on one host: joins, failures and compression, with two ranks on each of two hosts."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/mpi/test_by_name.py"]
    with Hosts(2) as hosts:
        done = hosts.run(pytest_, 2, timeout=240, env={"COMMLIB_TIMEOUT": "60"}, capture=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
