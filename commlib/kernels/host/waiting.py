"""Waiting: let time pass between two polls, first on the core, then off it, and not for long."""

from __future__ import annotations

import time
from typing import Any

import numba as nb
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from commlib.kernels.host import intrinsics as ins

ASK = -1  # it has taken long: Python looks around

# Nanoseconds for which a yield counts as one. On a core of its own it takes less than one of these. Where other
# processes compute, each of them uses up its slice first: of thousands of such yields, a warning, a limit of time or
# Ctrl-C would wait for half a minute. A library's question may yield, too (Open MPI's `mpi_yield_when_idle`).
_YIELD = 50_000
SAMPLE = 4  # one yield of so many is timed: to look at the clock takes a tenth of one


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
def late(began: int) -> Any:
    """Return as how many more polls one counts that `began` so long ago."""
    return (now() - began) // _YIELD


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def pause(polls: int, spins: int, yields: int, naps: int, microseconds: int) -> Any:
    """Let time pass after so many polls, the more the later; return how many there have been now, or ASK.

    spins: polls on the core. yields: then so many give it away, or for as long as these would take at most. naps: then
    so many sleep for some `microseconds`.
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
            polls = min(polls + SAMPLE * late(began), spins + yields)
    elif polls <= spins + yields + naps:
        ins.usleep(microseconds)
    else:
        return ASK
    return polls
