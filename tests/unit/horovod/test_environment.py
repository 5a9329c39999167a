"""Horovod's environment variables, as settings of commlib."""

from __future__ import annotations

import pytest

from commlib.config.settings import load
from commlib.errors import TransportError, UsageError
from commlib.horovod.environment import check_launcher, read


@pytest.mark.parametrize(
    "name, text, setting, value",
    [
        ("FUSION_THRESHOLD", str(32 << 20), "fusion_mib", 32),
        ("FUSION_THRESHOLD", "1", "fusion_mib", 1),
        ("FUSION_THRESHOLD", "0", "fusion_mib", 1),
        ("FUSION_THRESHOLD", str((5 << 20) + 1), "fusion_mib", 6),
        ("CACHE_CAPACITY", "2048", "known_names", 2048),
        ("CACHE_CAPACITY", "0", "known_names", 1),
        ("STALL_CHECK_TIME_SECONDS", "90", "stall_warning", 90.0),
        ("STALL_SHUTDOWN_TIME_SECONDS", "600", "timeout", 600.0),
        ("STALL_SHUTDOWN_TIME_SECONDS", "0", "timeout", 0.0),
        ("STALL_CHECK_DISABLE", "1", "stall_warning", 1e9),
        ("STALL_CHECK_DISABLE", "0", "stall_warning", 60.0),
        ("LOG_LEVEL", "TRACE", "log_level", "debug"),
        ("LOG_LEVEL", "fatal", "log_level", "error"),
        ("LOG_LEVEL", "Info", "log_level", "info"),
        ("LOG_LEVEL", "", "log_level", "warning"),
    ],
)
def test_known_variables_become_settings(name, text, setting, value):
    result = read({f"HOROVOD_{name}": text, "PATH": "/bin"})
    assert getattr(load(result.settings), setting) == value
    assert result.ignored == ()


def test_disabling_the_check_disables_the_shutdown():
    result = read({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"})
    assert load(result.settings).timeout == 0


@pytest.mark.parametrize("name", ["FUSION_THRESHOLD", "CACHE_CAPACITY", "STALL_CHECK_TIME_SECONDS", "LOG_LEVEL"])
def test_senseless_values_are_refused(name):
    with pytest.raises(UsageError, match=f"HOROVOD_{name}='much': expected"):
        read({f"HOROVOD_{name}": "much"})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("STALL_CHECK_TIME_SECONDS", "nan", "a number of seconds"),
        ("STALL_CHECK_TIME_SECONDS", "-5", "a number of seconds"),
        ("STALL_SHUTDOWN_TIME_SECONDS", "inf", "a number of seconds"),
        ("FUSION_THRESHOLD", "-3", "a number of bytes"),
        ("FUSION_THRESHOLD", "64MB", "a number of bytes"),
        ("FUSION_THRESHOLD", "1e300", "a number of bytes"),
        ("CACHE_CAPACITY", "-4", "a number of names"),
        ("CACHE_CAPACITY", "1024.5", "a number of names"),
        ("CACHE_CAPACITY", "99999999999999999999", "a number of names"),
        ("STALL_CHECK_DISABLE", "yes", "a number: 1 for on, 0 for off"),
        ("TIMELINE_MARK_CYCLES", "true", "a number: 1 for on, 0 for off"),
    ],
)
def test_values_out_of_range_are_named_with_horovods_variable(name, text, expected):
    """The error named a variable of commlib that was not set, or there was no error."""
    with pytest.raises(UsageError) as caught:
        read({f"HOROVOD_{name}": text})
    assert f"HOROVOD_{name}={text!r}: expected {expected}" in str(caught.value) and "COMMLIB" not in str(caught.value)


def test_a_timeline_is_read():
    result = read({"HOROVOD_TIMELINE": "trace.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    assert (result.timeline, result.mark_cycles, result.ignored) == ("trace.json", True, ())
    assert read({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""
    assert read({}).timeline == "" and not read({}).mark_cycles


def test_unsupported_variables_are_named_unless_they_match_the_default():
    result = read(
        {
            "HOROVOD_CYCLE_TIME": "3.5",
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_NEWS": "x",
            "HOROVOD_CPU_OPERATIONS": "MPI",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "HOROVOD_RANK": "0",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_THREAD_AFFINITY": "",
        }
    )
    assert result.ignored == (
        "HOROVOD_AUTOTUNE",
        "HOROVOD_CONTROLLER",
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_GPU_OPERATIONS",
        "HOROVOD_NEWS",
    )
    assert not result.settings


def test_a_launcher_without_mpi_is_detected():
    """Each process would train by itself, and look fine."""
    with pytest.raises(TransportError, match=r"started 4 processes .* but MPI sees one"):
        check_launcher({"HOROVOD_SIZE": "4"}, 1)
    for environment, size in (({"HOROVOD_SIZE": "4"}, 4), ({"HOROVOD_SIZE": "1"}, 1), ({}, 1)):
        check_launcher(environment, size)
