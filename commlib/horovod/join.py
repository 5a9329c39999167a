"""join: let the other ranks go on when a rank has run out of data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from commlib.errors import MismatchError
from commlib.horovod.operations import allgather_object, start_join


class StandIn(Protocol):
    """Reduces gradients in order on a communicator, so that a rank which has joined must take part in it.

    number: its place among those on this communicator, from 1. takes_turns: there are, or were, others on it.
    """

    number: int
    takes_turns: bool

    @property
    def comm(self) -> Any: ...

    def contribute_nothing(self) -> int | None: ...

    def stand_in(self) -> bool: ...

    def end_backward(self) -> None: ...


def join(reducers: Sequence[StandIn] = ()) -> int:
    """Wait until all ranks have called this; return the rank that did so last.

    Until then this rank takes part with nothing in what the others do by name, and in the reductions of `reducers`: it
    adds zeros, and an average is still over all ranks. Its own parameters stay what they are; broadcast them from the
    rank that is returned. Ordered verbs (`all_reduce` and so on) are not covered.
    """
    pending = start_join(blocking=not reducers)
    on_comm = defaultdict[int, list[StandIn]](list)
    for reducer in reducers:
        on_comm[id(reducer.comm)].append(reducer)
    groups = list(on_comm.values())
    if len(groups) <= 1:
        counts = [_stand_in(group) for group in groups]
    else:
        with ThreadPoolExecutor(len(groups), "commlib-join") as pool:
            counts = list(pool.map(_stand_in, groups))
    by_name: int = pending.wait()
    times = [number for number in counts if number is not None]
    return _last(by_name, allgather_object(sum(times) if times else None, "join.stood_in"))


def say_turn(comm: Any, number: int) -> int:
    """Return the number of the reducer on `comm` that reduces next; 0 if all ranks have joined. Collective.

    number: that of this rank's own, 0 on a rank that has joined. Raises MismatchError if ranks are at several.
    """
    said = comm.all_reduce(np.array([number, -number if number else np.iinfo(np.int64).min], np.int64), "max")
    highest, lowest = int(said[0]), -int(said[1])
    if highest and lowest != highest:
        raise MismatchError(
            f"ranks reduce the gradients of different optimizers at the same time, numbers {lowest} and {highest} on "
            f"this communicator (this is rank {comm.rank} of {comm.size}): run their backwards in one order everywhere"
        )
    return highest


def _stand_in(reducers: Sequence[StandIn]) -> int | None:
    """Take part with nothing in the reductions of those on one communicator; return how often, None if there is none.

    One alone knows that it is next. Of several, the ranks that have data say it.
    """
    comm = reducers[0].comm
    if not any(reducer.takes_turns for reducer in reducers) or comm.size == 1:
        counts = [count for reducer in reducers if (count := reducer.contribute_nothing()) is not None]
        return sum(counts) if counts else None
    for reducer in reducers:
        reducer.end_backward()  # one that raised and was caught
    numbered = {reducer.number: reducer for reducer in reducers}
    times = 0
    while number := say_turn(comm, 0):
        if number not in numbered:
            raise MismatchError(
                f"ranks reduce the gradients of optimizer {number} on this communicator, which is no more on rank "
                f"{comm.rank}: keep it until all ranks have joined"
            )
        numbered[number].stand_in()
        times += 1
    return times


def _last(by_name: int, counts: Sequence[int | None]) -> int:
    """Return the rank that came last: it took part in reductions of others least often, if they tell.

    Named operations alone cannot: ranks that only reduce gradients hear of all joins at once, when the last one comes.
    """
    times = {rank: number for rank, number in enumerate(counts) if number is not None}
    last = [rank for rank, number in times.items() if number == min(times.values())]
    return by_name if by_name in last or not last else last[-1]
