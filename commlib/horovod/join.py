"""join: let the other ranks continue when a rank has run out of data."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from commlib.errors import MismatchError
from commlib.horovod.operations import allgather_object, start_join


class JoinableReducer(Protocol):
    """Reduces gradients in program order on a communicator, so that a joined rank must take part.

    number: its number among those on this communicator, from 1. takes_turns: the communicator has or had several.
    """

    number: int
    takes_turns: bool

    @property
    def comm(self) -> Any: ...

    def take_turns(self) -> None:
        """Announce this reducer before each reduction from now on: see `announce_turn`."""
        ...

    def contribute_nothing(self) -> int | None: ...

    def contribute_nothing_once(self) -> bool: ...

    def end_backward(self) -> None: ...


def join(reducers: Sequence[JoinableReducer] = ()) -> int:
    """Wait until all ranks have joined; return the last rank to join.

    Until then this rank takes part, without data, in the others' operations by name and in the reductions of
    `reducers`: it adds zeros, and an average still divides by all ranks. Its parameters do not change; broadcast them
    from the returned rank. Ordered verbs (`all_reduce` and so on) are not covered.
    """
    pending = start_join(blocking=not reducers)
    on_comm = defaultdict[int, list[JoinableReducer]](list)
    for reducer in reducers:
        on_comm[id(reducer.comm)].append(reducer)
    groups = list(on_comm.values())
    if len(groups) <= 1:
        counts = [_contribute_nothing(group) for group in groups]
    else:
        with ThreadPoolExecutor(len(groups), "commlib-join") as pool:
            counts = list(pool.map(_contribute_nothing, groups))
    by_name: int = pending.wait()
    times = [number for number in counts if number is not None]
    return _last(by_name, allgather_object(sum(times) if times else None, "join.stood_in"))


def number_reducer(reducer: JoinableReducer, members: Callable[[], Iterable[JoinableReducer]]) -> None:
    """Number a new reducer among those on its communicator; if there are several, all take turns. Collective.

    members: the reducers of this rank. Ranks may have dropped earlier ones at different times: a reducer counts as long
    as it exists on any rank.
    """
    comm = reducer.comm

    def find_others() -> tuple[list[JoinableReducer], int]:
        others = [member for member in members() if member.comm is comm and member is not reducer]
        highest = max((member.number for member in others), default=0)
        return others, max(comm.all_gather_object(highest)) if comm.size > 1 else 0

    others, highest = find_others()
    if highest:
        gc.collect()  # a reducer in a reference cycle would cost overlap permanently
        others, highest = find_others()
    reducer.number, reducer.takes_turns = highest + 1, False
    if highest:
        for member in (*others, reducer):
            member.take_turns()


def announce_turn(comm: Any, number: int) -> int:
    """Return the number of the reducer on `comm` that reduces next; 0 if all ranks have joined. Collective.

    number: this rank's reducer, 0 on a joined rank. Raises MismatchError if ranks run different reducers.
    """
    bounds = comm.all_reduce(np.array([number, -number if number else np.iinfo(np.int64).min], np.int64), "max")
    highest, lowest = int(bounds[0]), -int(bounds[1])
    if highest and lowest != highest:
        raise MismatchError(
            f"ranks reduce the gradients of different optimizers at the same time, numbers {lowest} and {highest} on "
            f"this communicator (this is rank {comm.rank} of {comm.size}): run their backwards in the same order on "
            "all ranks"
        )
    return highest


def _contribute_nothing(reducers: Sequence[JoinableReducer]) -> int | None:
    """Take part without data in the reductions on one communicator; return their number, None if there is no reducer.

    A single reducer is always next. Of several, the ranks with data announce the next one.
    """
    comm = reducers[0].comm
    if not any(reducer.takes_turns for reducer in reducers) or comm.size == 1:
        counts = [count for reducer in reducers if (count := reducer.contribute_nothing()) is not None]
        return sum(counts) if counts else None
    for reducer in reducers:
        reducer.end_backward()  # a backward that raised, and was caught
    numbered = {reducer.number: reducer for reducer in reducers}
    times = 0
    while number := announce_turn(comm, 0):
        if number not in numbered:
            raise MismatchError(
                f"ranks reduce the gradients of optimizer {number} on this communicator, which no longer exists on "
                f"rank {comm.rank}: keep it until all ranks have joined"
            )
        numbered[number].contribute_nothing_once()
        times += 1
    return times


def _last(by_name: int, counts: Sequence[int | None]) -> int:
    """Return the last rank to join: the one that took part in the fewest reductions of others, if counts are known.

    Named operations alone do not show it: ranks that only reduce gradients learn of all joins at once, with the last.
    """
    times = {rank: number for rank, number in enumerate(counts) if number is not None}
    last = [rank for rank, number in times.items() if number == min(times.values())]
    return by_name if by_name in last or not last else last[-1]
