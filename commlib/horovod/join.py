"""join: let the other ranks go on when a rank has run out of data."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from commlib.errors import UsageError
from commlib.horovod.operations import allgather_object, start_join


class StandIn(Protocol):
    """Reduces gradients in order on a communicator, so that a rank which has joined must take part in it."""

    @property
    def comm(self) -> Any: ...

    def contribute_nothing(self) -> int | None: ...


def join(reducers: Sequence[StandIn] = ()) -> int:
    """Wait until all ranks have called this; return the rank that did so last.

    Until then this rank takes part with nothing in what the others do by name, and in the reductions of `reducers`: it
    adds zeros, and an average is still over all ranks. Its own parameters stay what they are; broadcast them from the
    rank that is returned. Ordered verbs (`all_reduce` and so on) are not covered.

    Raises UsageError if two of `reducers` reduce over the same communicator: it could not be known which one is next.
    """
    _check_apart(reducers)
    pending = start_join(blocking=not reducers)
    if len(reducers) <= 1:
        counts = [reducer.contribute_nothing() for reducer in reducers]
    else:
        with ThreadPoolExecutor(len(reducers), "commlib-join") as pool:
            counts = [ended.result() for ended in [pool.submit(reducer.contribute_nothing) for reducer in reducers]]
    by_name: int = pending.wait()
    times = [number for number in counts if number is not None]
    return _last(by_name, allgather_object(sum(times) if times else None, "join.stood_in"))


def _last(by_name: int, counts: Sequence[int | None]) -> int:
    """Return the rank that came last: it took part in reductions of others least often, if they tell.

    Named operations alone cannot: ranks that only reduce gradients hear of all joins at once, when the last one comes.
    """
    times = {rank: number for rank, number in enumerate(counts) if number is not None}
    last = [rank for rank, number in times.items() if number == min(times.values())]
    return by_name if by_name in last or not last else last[-1]


def _check_apart(reducers: Sequence[StandIn]) -> None:
    if len({id(reducer.comm) for reducer in reducers}) < len(reducers):
        raise UsageError(
            f"join: {len(reducers)} DistributedOptimizers or DataParallels reduce over fewer communicators; give each "
            "its own by comm=commlib.world().split(0), or a process set"
        )
