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
    """Runs `agree` on ranks that are threads. probed: the number of ranks that probed."""

    def __init__(self, monkeypatch, failure=""):
        self.probed = 0
        self._lock = threading.Lock()

        def probe():
            with self._lock:
                self.probed += 1
            return ProbeResult("", failure)

        monkeypatch.setattr(cuda_probe, "probe", probe)

    def agree(self, everyone):
        answers = {}
        threads = [
            threading.Thread(target=lambda end=end: answers.update({end.rank: agree(everyone, end)}), daemon=True)
            for end in transports(len(everyone))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(answers) == len(everyone) and len(set(answers.values())) == 1
        return answers[0]


YES, NO, UNKNOWN = (("a", Answer(says, f"MPI X: says {says}")) for says in (True, False, None))


def test_without_gpus_nothing_is_probed(monkeypatch):
    """Nothing is exchanged: a single rank gets the answer."""
    first, _ = transports(2)
    assert agree([None, None], first) is False


def test_one_rank_of_each_host_probes(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    with caplog.at_level(logging.INFO, "commlib"):
        assert ranks.agree([None, YES, YES, ("b", Answer(True, "")), ("b", Answer(None, ""))]) is True
    assert ranks.probed == 2
    assert [record.message for record in caplog.records] == [
        "MPI sends and receives GPU memory directly (MPI X: says True; a probe confirmed it)"
    ]


def test_one_negative_answer_is_enough(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    with caplog.at_level(logging.INFO, "commlib"):
        assert ranks.agree([YES, NO, None]) is False
    assert ranks.probed == 0
    assert "GPU data goes through host memory: MPI cannot use GPU memory (MPI X: says False)" in caplog.text


@pytest.mark.parametrize("reply, level", [(YES, logging.WARNING), (UNKNOWN, logging.INFO)])
def test_a_failed_probe_is_reported(monkeypatch, caplog, reply, level):
    ranks = Ranks(monkeypatch, "ended by SIGSEGV")
    with caplog.at_level(logging.INFO, "commlib"):
        assert ranks.agree([None, reply, reply]) is False
    [record] = caplog.records
    assert record.levelno == level and ranks.probed == 1
    assert "rank 1: ended by SIGSEGV" in record.message and "COMMLIB_CUDA_AWARE=yes" in record.message


def test_a_library_without_an_answer_is_probed(monkeypatch):
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
def test_the_users_setting_wins(monkeypatch, aware, devices, expected):
    settings = Config(cuda_aware=aware, mpi_devices=devices)
    assert list_device_kinds(settings) == expected
    if aware != "auto" or "cuda" in devices:
        monkeypatch.setattr(cuda_aware_mpi, "may_have_gpu", lambda: pytest.fail("it is settled"))
        assert report(settings) is None


def test_a_driver_and_cupy_mean_a_possible_gpu(monkeypatch):
    """A driver, CuPy, and no setting that hides all GPUs."""
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setitem(sys.modules, "cupy", object())
    assert may_have_gpu({}) and may_have_gpu({"CUDA_VISIBLE_DEVICES": "2,3"})
    for text in ("", "-1", " "):
        assert not may_have_gpu({"CUDA_VISIBLE_DEVICES": text})
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert not may_have_gpu({})
