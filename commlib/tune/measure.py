"""Measure a cluster: its links, and the time of every algorithm in every place where it may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median

import numpy as np

from commlib.communicator import Communicator
from commlib.cost.records import BEYOND_SCHEDULES, Entry, Fitted, Measured
from commlib.cost.table import Table, mpi_library
from commlib.errors import UsageError
from commlib.schedule import Link, algorithms
from commlib.tune.probe import measure_gamma, measure_link
from commlib.tune.scopes import Cluster, Place, survey
from commlib.tune.stopwatch import Call, Stopwatch

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
STEP = 4  # from size to size
SIZES = tuple(1024 * STEP**power for power in range(9))  # 1 KiB to 64 MiB
LINKS_SHARE = 0.1  # of the time

Progress = Callable[[float, str], None]


@dataclass(slots=True)
class _Contest:
    """The algorithms of one verb in one place, and the times they took.

    forecast: the seconds that the next size needs at least, each algorithm being called twice.
    """

    place: Place
    verb: str
    names: tuple[str, ...]
    times: list[Measured] = field(default_factory=list)
    forecast: float = 0.0


def measure(comm: Communicator, seconds: float = 60.0, progress: Progress = lambda done, what: None) -> Table:
    """Measure for `seconds` and return a table, the same on all ranks. Collective.

    Sizes are measured in ascending order, each for a fair part of the time that is left: where there is little, calls
    are repeated less often, then the largest sizes are left out, but no algorithm that the communicator knows. All
    counts from here on, what is compiled or connected at the first use as well, and the last measurement at most goes
    beyond the time; but the links and the smallest size are always measured. progress(done, what): called with the
    fraction of the time that is over, before each step.
    """
    if not seconds > 0:
        raise UsageError(f"measure: seconds must be positive, got {seconds}")
    if comm.size == 1:
        raise UsageError("measure: one rank sends no messages: start more, as in 'mpirun -n 8 commlib tune'")
    watch = Stopwatch(comm, seconds)
    progress(0.0, "warming up")
    cluster = survey(comm)
    contests = []
    for place in cluster.places:
        for verb in VERBS:
            progress(watch.done, f"warming up {verb}")
            contests.append(_Contest(place, verb, _accepted(comm, place, verb)))
    fitted = _measure_machine(comm, cluster, watch, progress)
    for size, contest, name in _run(contests, watch):
        progress(watch.done, f"{contest.verb} {name} of {size} bytes")
    progress(1.0, "done")
    return Table(tuple(_entry(contest) for contest in contests if contest.times), (fitted,))


def _accepted(comm: Communicator, place: Place, verb: str) -> tuple[str, ...]:
    """Return the algorithms that the place's groups do not refuse. Calls each once, which compiles and connects."""
    accepted = []
    for name in (*BEYOND_SCHEDULES, *algorithms(verb)):
        try:
            if (call := _call(place, verb, name, SIZES[0])) is not None:
                call()
                accepted.append(name)
        except UsageError:
            continue
    return tuple(comm.broadcast_object(accepted))  # rank 0 never looks on


def _measure_machine(comm: Communicator, cluster: Cluster, watch: Stopwatch, progress: Progress) -> Fitted:
    share = max(0.0, watch.left) * LINKS_SHARE / 3
    progress(watch.done, "combining")
    gamma = measure_gamma(watch, share)

    def link(where: str, pair: tuple[int, int] | None) -> Link | None:
        progress(watch.done, f"the link {where}")
        return measure_link(comm, pair, watch, share) if pair else None

    return Fitted(mpi_library(), link("in a node", cluster.neighbours), link("between nodes", cluster.across), gamma)


def _run(contests: list[_Contest], watch: Stopwatch) -> Iterator[tuple[int, _Contest, str]]:
    """Measure all contests, size by size, and say before each time what it is of."""
    for index, nbytes in enumerate(SIZES):
        taking_part = [contest for contest in contests if contest.place.smallest <= nbytes <= contest.place.largest]
        share = watch.left / (len(SIZES) - index) / sum(len(contest.names) for contest in taking_part)
        for contest in taking_part:
            if not index or watch.left > contest.forecast:
                yield from _compete(contest, nbytes, watch, share, must=not index)
            else:
                contest.forecast = inf  # of larger sizes, too


def _compete(
    contest: _Contest, nbytes: int, watch: Stopwatch, share: float, *, must: bool
) -> Iterator[tuple[int, _Contest, str]]:
    """Measure all algorithms of a contest, or have none of them measured: half a contest would have a wrong winner."""
    times = []
    for name in contest.names:
        if not must and watch.left <= 0:
            contest.forecast = inf
            return
        yield nbytes, contest, name
        seconds = median(watch.measure(_call(contest.place, contest.verb, name, nbytes), share))
        # It stands for all sizes that are nearer to this one than to the next, 4 times as large.
        times.append(Measured(2 * nbytes, name, 0, seconds))
    contest.times += times
    contest.forecast = 2 * STEP * sum(time.seconds for time in times)


def _call(place: Place, verb: str, name: str, nbytes: int) -> Call | None:
    """Return a call on `nbytes` of float32 (rounded to what the group can share evenly), None on a rank that looks on.

    `nbytes` is the first region's size, as `tune.model` has it.
    """
    if place.group is None:
        return None
    part = max(1, nbytes // 4 // place.size)
    whole = np.zeros(part * place.size, np.float32)
    do = getattr(place.group, verb)
    match verb:
        case "all_gather":
            return partial(do, whole[:part].copy(), out=whole, algorithm=name)
        case "reduce_scatter":
            return partial(do, whole, out=np.zeros(part, np.float32), algorithm=name)
        case "all_to_all":
            return partial(do, whole, out=np.zeros_like(whole), algorithm=name)
        case "all_reduce":
            return partial(do, whole, out=whole, algorithm=name)
        case _:
            return partial(do, whole, algorithm=name)


def _entry(contest: _Contest) -> Entry:
    times = tuple(sorted(contest.times, key=lambda time: (time.up_to, time.seconds)))
    place = contest.place
    return Entry(contest.verb, place.nodes, place.ranks_per_node, mpi_library(), "any", times)
