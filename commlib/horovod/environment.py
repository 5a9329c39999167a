"""Environment: read the HOROVOD_* variables that commlib supports.

    HOROVOD_FUSION_THRESHOLD=33554432    is    COMMLIB_FUSION_MIB=32

`init` reads them. A COMMLIB_* variable wins over its counterpart of Horovod. One warning names the variables that
commlib ignores, because a user who sets one expects an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from commlib.config.settings import load
from commlib.errors import TransportError, UsageError

Number = TypeVar("Number", int, float)

_NEVER = "1e9"
"""Seconds: 31 years."""

_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
}

_TAKEN_BY_INIT = ("HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES", "HOROVOD_STALL_CHECK_DISABLE")

# Set by Horovod's launchers for their processes. commlib gets ranks from MPI.
_OF_LAUNCHERS = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_SECRET_KEY",
    "HOROVOD_GLOO_",
)

# Variables whose listed values describe commlib's behaviour; an empty value matches any.
_IS_SO = {
    "HOROVOD_CONTROLLER": ("mpi",),
    "HOROVOD_CPU_OPERATIONS": ("mpi",),
    "HOROVOD_DYNAMIC_PROCESS_SETS": ("",),
    "HOROVOD_LOG_HIDE_TIME": ("",),
    "HOROVOD_MPI_THREADS_DISABLE": ("0",),
    "HOROVOD_ELASTIC": ("0",),
    "HOROVOD_AUTOTUNE": ("0",),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": ("0",),
    "HOROVOD_HIERARCHICAL_ALLGATHER": ("0",),
    "HOROVOD_TORUS_ALLREDUCE": ("0",),
    "HOROVOD_ENABLE_XLA_OPS": ("0",),
    "HOROVOD_ENABLE_ASYNC_COMPLETION": ("0",),
}


def _mib(text: str) -> str:
    return str(
        max(1, math.ceil(_not_negative(float(text)) / 2**20))
    )  # 0 disables fusion in Horovod; 1 MiB is the minimum


def _names(text: str) -> str:
    return str(max(1, _not_negative(int(text))))  # 0 disables the cache in Horovod


def _not_negative(number: Number) -> Number:
    if number < 0:
        raise ValueError
    return number


def _seconds(text: str) -> str:
    return str(float(text))


def _level(text: str) -> str:
    return _LEVELS[text.lower()]


_SETTINGS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "HOROVOD_FUSION_THRESHOLD": ("COMMLIB_FUSION_MIB", _mib, "a number of bytes"),
    "HOROVOD_CACHE_CAPACITY": ("COMMLIB_KNOWN_NAMES", _names, "a number of names"),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("COMMLIB_STALL_WARNING", _seconds, "a number of seconds"),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("COMMLIB_TIMEOUT", _seconds, "a number of seconds"),
    "HOROVOD_LOG_LEVEL": ("COMMLIB_LOG_LEVEL", _level, f"one of {', '.join(_LEVELS)}"),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The settings from Horovod's variables."""

    settings: Mapping[str, str]
    """COMMLIB_* variables, unless they are set themselves."""
    timeline: str
    """The file of a trace; "" for none."""
    mark_cycles: bool
    ignored: tuple[str, ...]
    """Variables that commlib does not support."""


def read(environment: Mapping[str, str]) -> Environment:
    """Return the settings from Horovod's variables in `environment`. Raises UsageError for invalid values."""
    given = {name: text.strip() for name, text in environment.items() if name.startswith("HOROVOD_")}
    settings: dict[str, str] = {}
    for name, (setting, convert, expected) in _SETTINGS.items():
        if not given.get(name):
            continue
        try:
            settings[setting] = convert(given[name])
        except (KeyError, ValueError, OverflowError):
            raise _unexpected(name, given[name], expected) from None
        try:
            load({setting: settings[setting]})
        except UsageError as error:  # it names a variable that the user did not set
            raise _unexpected(name, given[name], f"{expected} ({str(error).rpartition('expected ')[2]})") from None
    if _is_on(given, "HOROVOD_STALL_CHECK_DISABLE"):  # this also disables the timeout
        settings |= {"COMMLIB_STALL_WARNING": _NEVER, "COMMLIB_TIMEOUT": "0"}
    timeline = given.get("HOROVOD_TIMELINE", "")
    return Environment(
        settings,
        "" if timeline == "DYNAMIC" else timeline,  # DYNAMIC only allows start_timeline
        _is_on(given, "HOROVOD_TIMELINE_MARK_CYCLES"),
        tuple(sorted(name for name, text in given.items() if not _means_something(name, text))),
    )


def check_launcher(environment: Mapping[str, str], size: int) -> None:
    """Raise TransportError if a launcher without MPI started several processes, each a world of size 1."""
    started = environment.get("HOROVOD_SIZE", "")
    if started.isdecimal() and int(started) > 1 and size == 1:
        raise TransportError(
            f"a launcher of Horovod started {started} processes (HOROVOD_SIZE), but MPI sees one: start them with "
            f"mpirun -n {started}, srun or horovodrun --mpi, not through gloo"
        )


def _is_on(given: Mapping[str, str], name: str) -> bool:
    """Return whether a flag is a positive number, as in Horovod. Raises UsageError if it is not a number."""
    text = given.get(name, "")
    try:
        return bool(text) and int(text) > 0
    except ValueError:
        raise _unexpected(name, text, "a number: 1 for on, 0 for off") from None


def _unexpected(name: str, text: str, expected: str) -> UsageError:
    return UsageError(f"environment variable {name}={text!r}: expected {expected}")


def _means_something(name: str, text: str) -> bool:
    if not text or name in _SETTINGS or name in _TAKEN_BY_INIT or name.startswith(_OF_LAUNCHERS):
        return True
    values = _IS_SO.get(name, ())
    return "" in values or text.lower() in values
