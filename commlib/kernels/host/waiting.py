"""Waiting: pause between polls, first by spinning, then by yielding, then by short sleeps."""

from __future__ import annotations

import time
from typing import Any

import numba as nb
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from commlib.kernels.host import intrinsics as ins

LONG_WAIT = -1  # after a long wait: Python checks for signals and failures

# Nanoseconds for which a yield counts as one. On an idle core a yield takes less. If other processes compute, each uses
# up its time slice first. Thousands of such yields would delay a warning, a timeout or Ctrl-C by half a minute. A
# library's test may yield, too (Open MPI's `mpi_yield_when_idle`).
_YIELD = 50_000
SAMPLE = 4  # one yield in this many is timed, because reading the clock takes a tenth of a yield


@intrinsic
def now(typingctx: Any) -> Any:
    """Return the nanoseconds of the monotonic clock."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        timespec = ir.LiteralStructType([i64, i64])
        function_type = ir.FunctionType(i32, [i32, timespec.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, function_type, "clock_gettime")
        at = cgutils.alloca_once(builder, timespec)
        builder.call(function, [ir.Constant(i32, time.CLOCK_MONOTONIC), at])
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, at, 0, field)) for field in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(i64, 1_000_000_000)), rest)

    return types.int64(), codegen


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def count_late_polls(began: int) -> Any:
    """Return the number of extra polls for a poll that began at `began`."""
    return (now() - began) // _YIELD


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def pause(polls: int, spins: int, yields: int, naps: int, microseconds: int) -> Any:
    """Pause after `polls` polls, longer for later ones; return the new number of polls, or LONG_WAIT.

    spins: polls by spinning. yields: then polls by yielding, or for at most as long as these would take. naps: then
    sleeps of some `microseconds` each.
    """
    polls += 1
    if polls <= spins:
        ins.pause()
    elif polls <= spins + yields:
        if polls % SAMPLE:
            ins.sched_yield()
        else:
            began = now()
            ins.sched_yield()
            polls = min(polls + SAMPLE * count_late_polls(began), spins + yields)
    elif polls <= spins + yields + naps:
        ins.usleep(microseconds)
    else:
        return LONG_WAIT
    return polls
