"""join: a rank that has run out of data lets the others go on."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from commlib import horovod as core
from commlib.errors import UsageError
from commlib_torch._backward import backward_passes
from commlib_torch._gradients import Gradients


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; return the rank that did so last. `device` is not used.

    Until then this rank takes part with nothing in what the others do by name, and in the reductions of every
    DistributedOptimizer and DataParallel: it adds zeros, and an average is still over all ranks. Its own parameters
    stay what they are; broadcast them from the rank that is returned. Ordered verbs (`all_reduce` and so on) are not
    covered.

    Raises UsageError if two optimizers reduce over the same communicator: it could not be known which one is next.
    """
    if backward_passes.members:
        gc.collect()  # optimizers that are no more, but in a cycle with their scheduler, must not wait for anybody
    reducers: list[Gradients] = backward_passes.members
    _check_apart(reducers)
    pending = core.start_join()
    if len(reducers) <= 1:
        stood_in = [reducer.stand_in() for reducer in reducers]
    else:
        with ThreadPoolExecutor(len(reducers), "commlib-join") as pool:
            stood_in = [ended.result() for ended in [pool.submit(reducer.stand_in) for reducer in reducers]]
    by_name: int = pending.wait()
    times = [number for number in stood_in if number is not None]
    return _last(by_name, core.allgather_object(sum(times) if times else None, "join.stood_in"))


def _last(by_name: int, stood_in: Sequence[int | None]) -> int:
    """Return the rank that came last: who stood in for others least often, if reducers tell.

    Named operations alone cannot: ranks that only reduce gradients hear of all joins at once, when the last one comes.
    """
    times = {rank: number for rank, number in enumerate(stood_in) if number is not None}
    last = [rank for rank, number in times.items() if number == min(times.values())]
    return by_name if by_name in last or not last else last[-1]


def _check_apart(reducers: list[Gradients]) -> None:
    shared = [reducer.comm for reducer in reducers]
    if len({id(comm) for comm in shared}) < len(shared):
        raise UsageError(
            f"join: {len(shared)} DistributedOptimizers or DataParallels reduce over fewer communicators; give each "
            "its own by comm=commlib.world().split(0), or a process set"
        )
