"""Hang state: snapshot of this rank's calls and waits, taken by another thread while they run or hang.

It takes no lock of those threads and does not call MPI: the holder of a lock may be the thread that hangs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from commlib.dtypes import NUMPY
from commlib.observe.dump import CallPhase, CallState, GroupState, NamedCall, Wait, ranges_of
from commlib.observe.flight_recorder import LAST
from commlib.runtime.process import Runtime

_STALE, _SILENT = 1.5, 0.5
"""Seconds since a wait's last poll: up to _STALE it may continue, after _SILENT it has probably ended. Nothing records
the end of a wait. Polls are 0.1 s apart, or more on a busy machine."""

_SIZES = re.compile(r" of (?:(\d+) x|shape \(([\d, ]*)\)) (\w+)")  # the format of `collectives.call.Call`


def groups_by_key(runtime: Runtime) -> dict[str, Any]:
    """Return this process's groups by key. Private groups (parts of another group's operations) may share a key."""
    return {group.key: group for group in _list_safely(lambda: list(runtime.groups))}


def _list_safely(make: Callable[[], list[Any]]) -> list[Any]:
    """Make a list from a collection that other threads may change meanwhile."""
    while True:
        try:
            return make()
        except RuntimeError:  # its size changed during the iteration
            continue


def find_stuck(runtime: Runtime, after: float) -> set[float]:
    """Return the start times of this rank's waits that continue and have lasted longer than `after` seconds."""
    now = time.monotonic()
    by_name = {since for *_, since in _waiting_by_name(runtime) if now - since > after}
    long = [watch for watch in _long_waits(runtime) if watch.looked - watch.since > after]
    return by_name | {watch.since for watch in _still_waiting(long)}


def find_wait_starts(runtime: Runtime) -> set[float]:
    """Return the start times (`time.monotonic`) of this rank's waits; they identify the waits."""
    return {watch.since for watch in _long_waits(runtime, _SILENT)} | {since for *_, since in _waiting_by_name(runtime)}


def _long_waits(runtime: Runtime, stale: float = _STALE) -> list[Any]:
    watches = [watch for reference in runtime.waits.valuerefs() if (watch := reference()) is not None]
    return [watch for watch in watches if watch.looked > time.monotonic() - stale and watch.peers != ()]


def _still_waiting(watches: list[Any]) -> list[Any]:
    """Return the waits that continue, that is, poll once more, which takes 0.1 s."""
    seen = [(watch, watch.looked) for watch in watches]
    deadline = time.monotonic() + _STALE
    while any(watch.looked == before for watch, before in seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [watch for watch, before in seen if watch.looked > before]


def waits(runtime: Runtime) -> list[Wait]:
    """Return the waits of this process's threads that last longer than a moment, the longest first."""
    groups = groups_by_key(runtime)
    texts = [_wait(watch, groups, watch.looked) for watch in _still_waiting(_long_waits(runtime))]
    return sorted(texts, key=lambda wait: -wait.seconds)


def _wait(watch: Any, groups: Mapping[str, Any], now: float) -> Wait:
    group = groups.get(watch.group)
    if group is None:
        return Wait(watch.text, watch.group, 0, now - watch.since, watch.peers, watch.thread)
    user = groups.get(group.part_of, group)
    peers = None if watch.peers is None else tuple(int(group.ranks[peer]) for peer in watch.peers)
    sequence = user.call_number if peers is None else 0
    # The user made none of the calls of the group in which the ranks agree on named operations.
    text = watch.text if user.waits.explain is None else "agreement on operations by name"
    return Wait(text, user.key, sequence, now - watch.since, peers, watch.thread)


def group_states(runtime: Runtime) -> tuple[GroupState, ...]:
    """Return the states of groups with operations, without private groups (parts of another group's operations)."""
    by_name = {each.comm.group.key: each for each in _coordinators(runtime)}
    groups = (group for group in groups_by_key(runtime).values() if not group.part_of and group.size > 1)
    states = (_group_state(group) if group.key not in by_name else _set_state(by_name[group.key]) for group in groups)
    return tuple(sorted((state for state in states if state.operations), key=lambda state: state.key))


def _group_state(group: Any) -> GroupState:
    progress, calls = group.progress, group.call_number
    begun, queued = progress.unfinished()
    texts = list(progress.flight)[-LAST:]
    states: list[CallPhase] = ["ended"] * len(texts)
    if texts and progress.running.locked():
        states[-1] = "running"
    elif texts and begun:
        states[-1] = "begun"
    first = calls - len(texts) + 1
    numbers = range(first, first + len(texts))
    done = [_operation(*call) for call in zip(texts, numbers, states, strict=True)]
    waiting = [_operation(text, 0, "queued") for text in queued]
    operations = tuple([*done, *waiting][-LAST:])
    failure = "" if group.failure is None else f"{type(group.failure).__name__}: {group.failure}"
    return GroupState(group.key, group.name, ranges_of(group.ranks), calls, operations, failure)


def _set_state(coordinator: Any) -> GroupState:
    """Return the state of a group with named operations, without the internal calls in which its ranks agree."""
    group, comm = coordinator.comm.group, coordinator.comm
    done = [
        CallState(verb, text, 0, -1, "ended" if ended else "running") for verb, text, ended in coordinator.launched()
    ]
    waiting = [CallState(text.partition(" ")[0], text, 0, -1, "queued") for _, text, _ in coordinator.waiting()]
    ranks, operations = ranges_of(group.ranks), tuple([*done, *waiting][-LAST:])
    failure = "" if group.failure is None else f"{type(group.failure).__name__}: {group.failure}"
    return GroupState(group.key, comm.name, ranks, group.call_number, operations, failure)


def _operation(text: str, sequence: int, state: CallPhase) -> CallState:
    return CallState(text.replace(",", " ").partition(" ")[0], text, sequence, nbytes_of(text), state)


def nbytes_of(text: str) -> int:
    """Return the bytes of this rank's array in a call, from the call's text; -1 if the text lacks them."""
    match = _SIZES.search(text)
    if match is None or match[3] not in NUMPY:
        return -1
    count = 1
    for length in (match[1] or match[2]).replace(",", " ").split():
        count *= int(length)
    return count * NUMPY[match[3]].itemsize


def list_named(runtime: Runtime) -> tuple[NamedCall, ...]:
    """Return the named operations that have not run yet."""
    now = time.monotonic()
    return tuple(
        NamedCall(comm.name, name, text, ranges_of(comm.group.ranks), now - since)
        for comm, name, text, since in _waiting_by_name(runtime)
    )


def _waiting_by_name(runtime: Runtime) -> list[tuple[Any, str, str, float]]:
    """Return (communicator, name, text, start time) of each waiting named operation."""
    return [(each.comm, *waiting) for each in _coordinators(runtime) for waiting in each.waiting()]


def _coordinators(runtime: Runtime) -> list[Any]:
    services = runtime.services
    return [] if services is None else _list_safely(services.coordinators)
