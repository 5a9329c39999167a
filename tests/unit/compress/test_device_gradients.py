"""Every scheme on the gradients of a late device: the bits and states of the host, on one node and on several."""

from __future__ import annotations

import pytest

from commlib.collectives.device.staging_queue import StagingQueue
from commlib.config.settings import Config
from tests.bodies.compression import COMPRESSIONS, check
from tests.bodies.loopback import run
from tests.late import LATE

CONFIG = Config(timeout=20)

# Through host memory, and by messages of the device's own memory.
ways = pytest.mark.parametrize("devices", [(), ("late",)], ids=["staged", "direct"])


@ways
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_bits_and_states_match_the_host(name, devices):
    queued, races = LATE.queued, LATE.races
    run(2, lambda comm: check(comm, name), config=CONFIG, devices=devices)
    assert LATE.queued > queued and LATE.races == races


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1], [0, 1, 0]], ids=lambda nodes: "".join(map(str, nodes)))
@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_bits_match_the_host_across_nodes(nodes, name):
    races = LATE.races
    run(len(nodes), lambda comm: check(comm, name, within_node=False), nodes=nodes, config=CONFIG)
    assert LATE.races == races


@pytest.mark.parametrize("name", ["int8", "randomk", "powersgd"])
def test_a_missing_wait_of_the_host_is_detected(name, monkeypatch):
    monkeypatch.setattr(LATE, "delay", 0.004)
    monkeypatch.setattr("commlib.compress.memory.wait_for", lambda event, on_wait: None)
    with pytest.raises(AssertionError):
        run(2, lambda comm: check(comm, name), config=CONFIG)


def test_a_missing_wait_for_the_callers_stream_is_detected(monkeypatch):
    """As after backward, the gradients are still being written when the reduction is called."""
    monkeypatch.setattr(LATE, "delay", 0.004)
    plain = StagingQueue.run

    def hasty(self, text, run, x, ready, target):
        return plain(self, text, run, x, self.device.stream().record(), target)

    monkeypatch.setattr(StagingQueue, "run", hasty)
    with pytest.raises(AssertionError):
        run(2, lambda comm: check(comm, "int8"), config=CONFIG)
