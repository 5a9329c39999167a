"""Measure a cluster: its links, and the time of each algorithm in each scope where it may be chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.cost.records import BEYOND_SCHEDULES, Entry, FittedMachine, MeasuredTime
from commlib.cost.table import Table, mpi_library
from commlib.devices.protocol import Device
from commlib.errors import UsageError
from commlib.schedule import LinkCost, algorithms
from commlib.tune.probe import measure_gamma, measure_link
from commlib.tune.scopes import Cluster, Scope, device_scope, survey
from commlib.tune.stopwatch import Stopwatch, TimedCall

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
STEP = 4  # factor between sizes
SIZES = tuple(1024 * STEP**power for power in range(9))  # 1 KiB to 64 MiB
DEVICE_SIZES = (*SIZES, 1024 * STEP**9)
LINKS_SHARE = 0.1  # of the time

Progress = Callable[[float, str], None]


@dataclass(slots=True)
class _Contest:
    """The algorithms of one verb in one scope, and their times.

    forecast: the least seconds needed for the next size, with two calls of each algorithm.
    """

    place: Scope
    verb: str
    names: tuple[str, ...]
    times: list[MeasuredTime] = field(default_factory=list)
    forecast: float = 0.0


def measure(comm: Communicator, seconds: float = 60.0, progress: Progress = lambda done, what: None) -> Table:
    """Measure for `seconds` and return a table, the same on all ranks. Collective.

    Sizes are measured in ascending order, each with a fair share of the remaining time. If time is short, calls are
    repeated less often, then the largest sizes are skipped, but never an algorithm that the communicator has. The time
    includes compilation and connections at first use. Only the last measurement may exceed it, but the links and the
    smallest size are always measured. progress(done, what): called before each step with the fraction of the time that
    has passed.
    """
    watch = _begin(comm, seconds, progress)
    cluster = survey(comm)
    contests = _contests(comm, cluster.places, lambda verb: (*BEYOND_SCHEDULES, *algorithms(verb)), watch, progress)
    fitted = _measure_machine(comm, cluster, watch, progress)
    return Table(_entries(contests, SIZES, watch, progress), (fitted,))


def measure_on(
    comm: Communicator, device: Device, seconds: float = 60.0, progress: Progress = lambda done, what: None
) -> Table:
    """Measure the paths of calls on arrays of a device in the same way, for all ranks; each rank has a device.

    All-reduces use symmetric memory, as for gradients; the other verbs use ordinary arrays. Each time lasts until the
    device has finished.
    """
    watch = _begin(comm, seconds, progress)
    paths = comm.paths(device)
    beyond = [name for name in paths if name != "messages"]
    names = partial(_path_names, beyond, has_messages="messages" in paths)
    contests = _contests(comm, [device_scope(comm, device)], names, watch, progress)
    return Table(_entries(contests, DEVICE_SIZES, watch, progress))


def _path_names(beyond: Sequence[str], verb: str, *, has_messages: bool) -> tuple[str, ...]:
    return (*beyond, "native", *algorithms(verb)) if has_messages else tuple(beyond)


def check_ranks(comm: Communicator) -> None:
    """Raise UsageError if there is nothing to measure."""
    if comm.size == 1:
        raise UsageError("measure: one rank sends no messages: start more ranks, as in 'mpirun -n 8 commlib tune'")


def _begin(comm: Communicator, seconds: float, progress: Progress) -> Stopwatch:
    if not seconds > 0:
        raise UsageError(f"measure: seconds must be positive, got {seconds}")
    check_ranks(comm)
    watch = Stopwatch(comm, seconds)
    progress(0.0, "warming up")
    return watch


def _contests(
    comm: Communicator,
    places: Sequence[Scope],
    names: Callable[[str], Sequence[str]],
    watch: Stopwatch,
    progress: Progress,
) -> list[_Contest]:
    contests = []
    for place in places:
        for verb in VERBS:
            progress(watch.done, f"warming up {verb}")
            contests.append(_Contest(place, verb, _find_accepted(comm, place, verb, names(verb))))
    return contests


def _entries(contests: list[_Contest], sizes: Sequence[int], watch: Stopwatch, progress: Progress) -> tuple[Entry, ...]:
    for size, contest, name in _run(contests, sizes, watch):
        progress(watch.done, f"{contest.verb} {name} of {size} bytes")
    progress(1.0, "done")
    return tuple(_entry(contest) for contest in contests if contest.times)


def _find_accepted(comm: Communicator, place: Scope, verb: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms that the scope's groups accept. Calls each once, which compiles and connects."""
    accepted = []
    for name in names:
        try:
            if (call := _call(place, verb, name, SIZES[0])) is not None:
                call()
                accepted.append(name)
        except UsageError:
            continue
    return tuple(comm.broadcast_object(accepted))  # rank 0 is in every scope


def _measure_machine(comm: Communicator, cluster: Cluster, watch: Stopwatch, progress: Progress) -> FittedMachine:
    share = max(0.0, watch.remaining) * LINKS_SHARE / 3
    progress(watch.done, "combining")
    gamma = measure_gamma(watch, share)

    def link(where: str, pair: tuple[int, int] | None) -> LinkCost | None:
        progress(watch.done, f"the link {where}")
        return measure_link(comm, pair, watch, share) if pair else None

    return FittedMachine(
        mpi_library(), link("in a node", cluster.neighbours), link("between nodes", cluster.across), gamma
    )


def _run(contests: list[_Contest], sizes: Sequence[int], watch: Stopwatch) -> Iterator[tuple[int, _Contest, str]]:
    """Measure all contests, size by size, and yield each measurement before it starts."""
    for index, nbytes in enumerate(sizes):
        taking_part = [contest for contest in contests if contest.place.smallest <= nbytes <= contest.place.largest]
        share = watch.remaining / (len(sizes) - index) / sum(len(contest.names) for contest in taking_part)
        for contest in taking_part:
            if not index or watch.remaining > contest.forecast:
                yield from _compete(contest, nbytes, watch, share, must=not index)
            else:
                contest.forecast = inf  # skip larger sizes, too


def _compete(
    contest: _Contest, nbytes: int, watch: Stopwatch, share: float, *, must: bool
) -> Iterator[tuple[int, _Contest, str]]:
    """Measure all algorithms of a contest or none: an incomplete contest could have a wrong winner."""
    times = []
    for name in contest.names:
        if not must and watch.remaining <= 0:
            contest.forecast = inf
            return
        yield nbytes, contest, name
        seconds = median(watch.measure(_call(contest.place, contest.verb, name, nbytes), share))
        # It covers all sizes that are closer to this one than to the next, which is 4 times as large.
        times.append(MeasuredTime(2 * nbytes, name, 0, seconds))
    contest.times += times
    contest.forecast = 2 * STEP * sum(time.seconds for time in times)


def _call(place: Scope, verb: str, name: str, nbytes: int) -> TimedCall | None:
    """Return a call on `nbytes` of float32, rounded to an even share for each rank; None on a rank outside the scope.

    `nbytes` is the size of the first region, as in `cost.model`.
    """
    if place.group is None:
        return None
    zeros = partial(_zeros, place.device)
    part = max(1, nbytes // 4 // place.size)
    count = part * place.size
    do = getattr(place.group, verb)
    match verb:
        case "all_gather":
            call = partial(do, zeros(part), out=zeros(count), algorithm=name)
        case "reduce_scatter":
            call = partial(do, zeros(count), out=zeros(part), algorithm=name)
        case "all_to_all":
            call = partial(do, zeros(count), out=zeros(count), algorithm=name)
        case "all_reduce":
            whole = zeros(count) if place.device is None else place.group.empty(count, "float32", place.device)
            call = partial(do, whole, out=whole, algorithm=name)
        case _:
            call = partial(do, zeros(count), algorithm=name)
    return call if place.device is None else partial(_run_to_completion, place.device, place.group, call)


def _zeros(device: Device | None, count: int) -> Any:
    if device is None:
        return np.zeros(count, np.float32)
    array = device.empty((count,), np.dtype(np.float32))
    device.kernels.fill(device.wrap(array, "measure"), 0)
    return array


def _run_to_completion(device: Device, group: Communicator, call: TimedCall) -> None:
    """Make a call, and poll until the device has finished it: sleeping would add to the measured time."""
    call()
    done, watch = device.current().record(), group.watch(f"the end of a call on {device.name}")
    while not done.done():
        watch()
        time.sleep(0)


def _entry(contest: _Contest) -> Entry:
    times = tuple(sorted(contest.times, key=lambda time: (time.up_to, time.seconds)))
    place = contest.place
    device = "" if place.device is None else place.device.name
    return Entry(contest.verb, place.nodes, place.ranks_per_node, mpi_library(), "any", times, device)
