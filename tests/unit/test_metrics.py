"""Counts of operations, as programs, Prometheus and experiment trackers read them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import commlib
from commlib import metrics
from commlib.errors import UsageError
from commlib.transport.loopback import transports
from tests.bodies.loopback import run


@pytest.fixture
def comm():
    """A world of one rank, over no MPI."""
    (transport,) = transports(1)
    yield commlib.init(transport=transport)
    commlib.shutdown()


def parsed(text):
    """Return the samples by (name, group, verb), and the labels of one of them."""
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"counter"}
    samples = [sample for family in families for sample in family.samples]
    values = {(s.name, s.labels["group"], s.labels["verb"]): s.value for s in samples}
    return values, samples[0].labels


def test_calls_are_counted_once_counting_is_on(comm):
    comm.all_reduce(np.ones(4, "float32"))
    with pytest.raises(UsageError, match=r"commlib\.metrics\.start"):
        comm.stats()
    metrics.start()
    comm.all_reduce(np.ones(4, "float32"))
    comm.all_reduce(np.ones(6, "float32"))
    comm.barrier()
    stats = comm.stats()
    assert set(stats) == {"all_reduce", "barrier"} and len(stats) == 2
    count = stats["all_reduce"]
    assert (count.calls, count.failed, count.nbytes) == (2, 0, 40) and 0 < count.seconds == count.exposed
    assert stats.as_dict()["all_reduce"] == count.as_dict() and count.as_dict()["nbytes"] == 40
    assert commlib.statistics()["world", "all_reduce"] == count
    with pytest.raises(AttributeError):
        stats.counts = {}


def test_time_hidden_by_other_work_is_not_exposed(comm):
    """The work takes long, and is waited for at its end only."""
    metrics.start()
    release = threading.Event()
    plan = comm.plan_program("a program", lambda: release.wait(10))
    work = plan.start()
    time.sleep(0.2)
    threading.Timer(0.05, release.set).start()
    work.wait()
    (count,) = comm.stats().values()
    assert 0.04 < count.exposed < 0.15 and count.seconds > 0.2 and count.exposed < count.seconds - 0.1


def test_a_message_is_exposed_once():
    """A blocking one is posted, and then waited for."""

    def body(comm):
        comm.runtime.recording.start_counting()
        array = np.ones(100_000, "float32")
        if comm.rank == 0:
            time.sleep(0.2)
            comm.send(array, 1)
        else:
            comm.recv(array, 0)
        return comm.stats()

    sent, received = run(2, body)
    assert (sent["send"].calls, sent["send"].nbytes) == (1, 400_000)
    count = received["recv"]
    assert 0.15 < count.exposed <= count.seconds + 0.05


def test_counting_continues_with_other_recordings(comm):
    metrics.start()
    comm.barrier()
    commlib.start_recording()
    comm.barrier()
    commlib.stop_recording()
    comm.barrier()
    assert comm.stats()["barrier"].calls == 3


def test_prometheus_reads_the_file(comm, tmp_path):
    metrics.start()
    comm.all_reduce(np.ones(4, "float32"))
    metrics.write_textfile(f"{tmp_path}/commlib-{{rank}}.prom")
    assert [path.name for path in tmp_path.iterdir()] == ["commlib-0.prom"]
    values, labels = parsed((tmp_path / "commlib-0.prom").read_text())
    assert labels["rank"] == "0"
    assert values["commlib_calls_total", "world", "all_reduce"] == 1
    assert values["commlib_bytes_total", "world", "all_reduce"] == 16
    assert values["commlib_failed_calls_total", "world", "all_reduce"] == 0
    count = comm.stats()["all_reduce"]
    assert values["commlib_seconds_total", "world", "all_reduce"] == count.seconds
    assert values["commlib_exposed_seconds_total", "world", "all_reduce"] == count.exposed
    with pytest.raises(UsageError, match=r"rank 0: cannot write /nowhere/x\.prom"):
        metrics.write_textfile("/nowhere/x.prom")


def test_a_scrape_returns_current_counts(comm):
    server = metrics.serve()
    try:
        comm.barrier()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
            values, _ = parsed(reply.read().decode())
        assert values["commlib_calls_total", "world", "barrier"] == 1
        with pytest.raises(UsageError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}"):
            metrics.serve(server.port)
    finally:
        server.close()


def test_trackers_get_a_flat_dict(comm):
    metrics.start()
    comm.barrier()
    comm.split(0, name="a (b)").barrier()
    values = metrics.values("x/")
    assert values["x/world/barrier/calls"] == 1.0 and values["x/a _b_/barrier/calls"] == 1.0
    assert {type(value) for value in values.values()} == {float}
    assert {key.rpartition("/")[2] for key in values} == {
        "calls", "failed_calls", "bytes", "seconds", "queued_seconds", "exposed_seconds",
    }  # fmt: skip


def test_callbacks_may_fail_and_stop_at_shutdown(comm, caplog):
    got, enough = [], threading.Event()

    def callback(values):
        got.append(values)
        if len(got) == 1:
            raise ValueError("not reached")
        enough.set()

    reports = metrics.on_metrics(callback, every=0.02)
    comm.barrier()
    assert enough.wait(10)
    reports.close()
    calls = len(got)
    time.sleep(0.1)
    assert len(got) == calls and got[-1]["commlib/world/barrier/calls"] == 1.0
    with pytest.raises(UsageError, match="every is 0, expected a positive number of seconds"):
        metrics.on_metrics(callback, every=0)


def test_a_missing_prometheus_client_is_an_error_with_the_extra():
    program = """
import sys
sys.modules["prometheus_client"] = None
from commlib import metrics
try:
    metrics.registry()
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "need prometheus-client" in done.stdout and "'metrics'" in done.stdout
