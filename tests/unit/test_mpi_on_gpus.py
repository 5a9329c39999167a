"""Ranks agree whether MPI takes memory of GPUs; some have no GPU."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from commlib import cuda_aware_mpi
from commlib.config.settings import Config
from commlib.cuda_aware_mpi import agree, list_device_kinds, may_have_gpu, report
from commlib.transport import cuda_probe
from commlib.transport.cuda_aware import Answer
from commlib.transport.cuda_probe import ProbeResult
from commlib.transport.loopback import transports


class Ranks:
    """Runs `agree` on ranks that are threads. probed: by how many ranks it was tried."""

    def __init__(self, monkeypatch, failure=""):
        self.probed = 0
        self._lock = threading.Lock()

        def probe():
            with self._lock:
                self.probed += 1
            return ProbeResult("", failure)

        monkeypatch.setattr(cuda_probe, "probe", probe)

    def agree(self, everyone):
        found = {}
        threads = [
            threading.Thread(target=lambda end=end: found.update({end.rank: agree(everyone, end)}), daemon=True)
            for end in transports(len(everyone))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == len(everyone) and len(set(found.values())) == 1
        return found[0]


YES, NO, UNKNOWN = (("a", Answer(says, f"MPI X: says {says}")) for says in (True, False, None))


def test_nobody_has_a_gpu(monkeypatch):
    """Nothing is exchanged: one rank alone learns it."""
    first, _ = transports(2)
    assert agree([None, None], first) is False


def test_one_rank_of_each_host_tries(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    with caplog.at_level(logging.INFO, "commlib"):
        assert ranks.agree([None, YES, YES, ("b", Answer(True, "")), ("b", Answer(None, ""))]) is True
    assert ranks.probed == 2
    assert [record.message for record in caplog.records] == [
        "MPI sends and receives GPU memory directly (MPI X: says True; a probe confirmed it)"
    ]


def test_one_no_is_enough(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    with caplog.at_level(logging.INFO, "commlib"):
        assert ranks.agree([YES, NO, None]) is False
    assert ranks.probed == 0
    assert "GPU data goes through host memory: MPI cannot use GPU memory (MPI X: says False)" in caplog.text


@pytest.mark.parametrize("told, level", [(YES, logging.WARNING), (UNKNOWN, logging.INFO)])
def test_a_probe_that_fails(monkeypatch, caplog, told, level):
    ranks = Ranks(monkeypatch, "ended by SIGSEGV")
    with caplog.at_level(logging.INFO, "commlib"):
        assert ranks.agree([None, told, told]) is False
    [record] = caplog.records
    assert record.levelno == level and ranks.probed == 1
    assert "rank 1: ended by SIGSEGV" in record.message and "COMMLIB_CUDA_AWARE=yes" in record.message


def test_a_library_that_cannot_be_asked_is_tried(monkeypatch):
    assert Ranks(monkeypatch).agree([UNKNOWN, UNKNOWN]) is True


@pytest.mark.parametrize(
    "aware, devices, expected",
    [
        ("auto", "", set()),
        ("auto", "late, cuda", {"late", "cuda"}),
        ("yes", "late", {"late", "cuda"}),
        ("no", "late,cuda", {"late"}),
        ("no", "", set()),
    ],
)
def test_what_the_user_says_counts(monkeypatch, aware, devices, expected):
    settings = Config(cuda_aware=aware, mpi_devices=devices)
    assert list_device_kinds(settings) == expected
    if aware != "auto" or "cuda" in devices:
        monkeypatch.setattr(cuda_aware_mpi, "may_have_gpu", lambda: pytest.fail("it is settled"))
        assert report(settings) is None


def test_who_may_have_a_gpu(monkeypatch):
    """A driver, CuPy, and no word that hides all GPUs."""
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setitem(sys.modules, "cupy", object())
    assert may_have_gpu({}) and may_have_gpu({"CUDA_VISIBLE_DEVICES": "2,3"})
    for text in ("", "-1", " "):
        assert not may_have_gpu({"CUDA_VISIBLE_DEVICES": text})
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert not may_have_gpu({})
