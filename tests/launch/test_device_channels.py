"""Device channels at the end of jobs: a rank that dies, exits early, or waits for ever."""

from __future__ import annotations

import re

import pytest

from tests.launch.test_channels import OPEN_THERE as OPEN
from tests.launch.test_channels import WAYS_THERE
from tests.launch.test_failures import end, hydra, names_rank_1

__all__ = ["hydra"]

PATHS = pytest.mark.parametrize(
    "env",
    [pytest.param(env, id=way, marks=[pytest.mark.long] * (way != "peers")) for way, env in WAYS_THERE.items()],
)


@pytest.mark.any_mpi
@PATHS
def test_a_rank_that_exits_with_messages_in_flight(mpirun, env):
    """They arrive, slow as its device is; a rank that waits for another one gets an error that names the rank."""
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
if comm.rank == 1:
    LATE.delay = 0.3
    event()
    for number in (7.0, 8.0, 9.0):
        channel.send(LATE.put(np.full(20_000, number)))
    commlib.shutdown()
else:
    print("got", [float(channel.recv().numpy()[-1]) for _ in range(3)], flush=True)
    channel.release()
    try:
        channel.recv()
    except commlib.PeerError as error:
        print(type(error).__name__, error, flush=True)
""",
        env=env,
    )
    assert code == 0, err
    assert "got [7.0, 8.0, 9.0]" in out
    assert re.search(r"PeerError .*recv on channel 'stage' with rank 1: .*rank 1 has shut commlib down or left", out)


@PATHS
def test_a_rank_that_is_killed(mpirun, env):
    """The other rank's stream waits for its message, and the host for that stream."""
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
if comm.rank == 1:
    LATE.delay = 3
    channel.send(LATE.put(np.ones(1000)))
    event()
    os.kill(os.getpid(), signal.SIGKILL)
channel.recv().numpy()
channel.recv()
""",
        env=env,
    )
    assert code != 0 and names_rank_1(out, err)


@pytest.mark.any_mpi
@PATHS
def test_sends_after_the_end_are_refused(mpirun, env):
    code, out, err = end(
        mpirun,
        2,
        f"""{OPEN}
event()
commlib.shutdown()
for call in (lambda: channel.send(LATE.put(np.ones(3))), channel.recv, channel.buffer, channel.ready):
    try:
        call()
    except commlib.ShutdownError as error:
        print(type(error).__name__, flush=True)
""",
        env=env,
    )
    assert code == 0, err
    assert out.count("ShutdownError") == 8
