"""Channels at the end of jobs: a rank that dies, exits, or waits for ever, and a forked child."""

from __future__ import annotations

import re

import pytest

from tests.launch.test_failures import end, hydra, names_rank_1

__all__ = ["hydra"]

PATHS = pytest.mark.parametrize("env", [{}, {"COMMLIB_NODE_PATH": "0"}], ids=["node", "messages"])

OPEN = """
channel = comm.channel(1 - comm.rank, "stage", (1000,), "float64")
channel.send(np.ones(1000)); channel.recv(); channel.release()
comm.barrier()
"""

# On the late device, whose arrays these calls do not inspect.
OPEN_THERE = """
from tests.late import LATE
LATE.has_signals = True
channel = comm.channel(1 - comm.rank, "stage", (1000,), "float64", 3, device=LATE)
channel.send(LATE.put(np.ones(1000))); channel.recv(); channel.release()
comm.barrier()
"""

WAYS_THERE = {
    "peers": {},
    "between": {"COMMLIB_DEVICE_IPC": "0"},
    "staged": {"COMMLIB_DEVICE_PEERS": "0"},
    "messages": {"COMMLIB_NODE_PATH": "0"},
}

OPENINGS = pytest.mark.parametrize(
    ("opening", "env"),
    [
        pytest.param(OPEN, {}, id="node"),
        pytest.param(OPEN, {"COMMLIB_NODE_PATH": "0"}, id="messages"),
        *(pytest.param(OPEN_THERE, env, id=f"device {way}", marks=pytest.mark.long) for way, env in WAYS_THERE.items()),
    ],
)


def test_a_rank_that_is_killed(mpirun):
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
if comm.rank == 1:
    event()
    os.kill(os.getpid(), signal.SIGKILL)
channel.recv()
""",
    )
    assert code != 0 and names_rank_1(out, err)


@PATHS
def test_a_rank_that_exits_after_its_last_message(mpirun, env):
    """The message arrives; a rank that waits for another one gets an error that names the rank."""
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
if comm.rank == 1:
    channel.send(np.full(200_000, 7.0))  # longer than the inbox
    channel.send(np.full(3, 8.0))
    event()
    commlib.shutdown()
else:
    time.sleep(0.5)
    print("sum", channel.recv().sum() + channel.recv().sum(), flush=True)
    channel.release()
    try:
        channel.recv()
    except commlib.PeerError as error:
        print(type(error).__name__, error, flush=True)
""",
        env=env,
    )
    assert code == 0, err
    assert "sum 1400024.0" in out
    assert re.search(r"PeerError .*recv on channel 'stage' with rank 1: .*rank 1 has shut commlib down or left", out)


@OPENINGS
def test_a_rank_that_raises_ends_the_job(mpirun, env, opening):
    code, _, err = end(
        mpirun,
        2,
        f"""{opening}
if comm.rank == 1:
    event()
    raise ValueError("out of luck")
channel.recv()
""",
        env=env,
    )
    assert code != 0 and "ValueError: out of luck" in err


@OPENINGS
def test_an_endless_wait_ends_with_the_timeout(mpirun, env, opening):
    code, _, err = end(
        mpirun,
        2,
        f"""{opening}
if comm.rank == 1:
    event()
    time.sleep(30)
channel.recv()
""",
        env={**env, "COMMLIB_TIMEOUT": "2"},
    )
    assert code != 0
    assert re.search(r"StallError: world: recv on channel 'stage' with rank 1: rank 0: gave up after 2", err)


@pytest.mark.any_mpi
@PATHS
def test_shutdown_ends_a_wait_in_another_thread(mpirun, env):
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
import threading
def wait():
    try:
        channel.recv()
    except commlib.CommlibError as error:
        print(type(error).__name__, flush=True)
thread = threading.Thread(target=wait)
thread.start()
time.sleep(0.3)
comm.barrier()
event()
commlib.shutdown()
thread.join(5)
assert not thread.is_alive()
""",
        env=env,
    )
    assert code == 0, err
    assert re.findall(r"ShutdownError|PeerError", out)


@pytest.mark.any_mpi
@PATHS
def test_a_forked_child_is_refused_and_disturbs_nothing(mpirun, env):
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
event()
child = os.fork()
if child == 0:
    calls = [lambda: channel.send(np.zeros(1000)), channel.recv, channel.ready, lambda: channel.send_async(np.zeros(3)),
             lambda: comm.channel(1 - comm.rank, "other", (3,))]
    for call in calls:
        try:
            call()
        except commlib.UsageError as error:
            assert "was forked by process" in str(error), error
        else:
            os._exit(5)
    channel.close()
    del channel
    os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
for step in range(100):
    channel.send(np.full(1000, float(step)))
    assert channel.recv()[-1] == step
    channel.release()
print("well", flush=True)
""",
        env=env,
    )
    assert code == 0, err
    assert out.count("well") == 2
