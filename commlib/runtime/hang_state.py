"""Hang state: what this rank has done and waits for, read from outside while its threads go on or are stuck.

Nothing here takes a lock of theirs or asks MPI: whoever holds one may be what hangs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from commlib.dtypes import NUMPY
from commlib.observe.dump import GroupState, Named, Operation, State, Wait, ranges_of
from commlib.observe.flight import LAST
from commlib.runtime.process import Runtime

_STALE, _SILENT = 1.5, 0.5
"""Seconds after its last look in which a wait may go on, and after which it has probably ended: nobody tells of that.
Looks are 0.1 s apart, on a busy machine more."""

_SIZES = re.compile(r" of (?:(\d+) x|shape \(([\d, ]*)\)) (\w+)")  # as `collectives.call.Call` words them


def groups_by_key(runtime: Runtime) -> dict[str, Any]:
    """Return this process's groups. Of those that run parts of another one's operations, several may have one key."""
    return {group.key: group for group in _listed(lambda: list(runtime.groups))}


def _listed(make: Callable[[], list[Any]]) -> list[Any]:
    """Return a list of what other threads add to meanwhile."""
    while True:
        try:
            return make()
        except RuntimeError:  # it has changed its size on the way
            continue


def stuck(runtime: Runtime, after: float) -> set[float]:
    """Return when those waits of this rank began that go on and have lasted for so many seconds."""
    now = time.monotonic()
    by_name = {since for *_, since in _by_name(runtime) if now - since > after}
    long = [watch for watch in _lasting(runtime) if watch.looked - watch.since > after]
    return by_name | {watch.since for watch in _still(long)}


def began(runtime: Runtime) -> set[float]:
    """Return when what this rank waits for began (`time.monotonic`): this tells one wait from any other."""
    return {watch.since for watch in _lasting(runtime, _SILENT)} | {since for *_, since in _by_name(runtime)}


def _lasting(runtime: Runtime, stale: float = _STALE) -> list[Any]:
    watches = [watch for reference in runtime.waits.valuerefs() if (watch := reference()) is not None]
    return [watch for watch in watches if watch.looked > time.monotonic() - stale and watch.peers != ()]


def _still(watches: list[Any]) -> list[Any]:
    """Return those that go on: they look around once more, which takes 0.1 s."""
    seen = [(watch, watch.looked) for watch in watches]
    deadline = time.monotonic() + _STALE
    while any(watch.looked == before for watch, before in seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [watch for watch, before in seen if watch.looked > before]


def waits(runtime: Runtime) -> list[Wait]:
    """Return what threads of this process wait for and have waited for longer than a moment, the longest first."""
    groups = groups_by_key(runtime)
    found = [_wait(watch, groups, watch.looked) for watch in _still(_lasting(runtime))]
    return sorted(found, key=lambda wait: -wait.seconds)


def _wait(watch: Any, groups: Mapping[str, Any], now: float) -> Wait:
    group = groups.get(watch.group)
    if group is None:
        return Wait(watch.text, watch.group, 0, now - watch.since, watch.peers, watch.thread)
    user = groups.get(group.part_of, group)
    peers = None if watch.peers is None else tuple(int(group.ranks[peer]) for peer in watch.peers)
    sequence = user.call_number if peers is None else 0
    # Its user has called none of what a speaker's group does.
    text = watch.text if user.explain is None else "agreement on operations by name"
    return Wait(text, user.key, sequence, now - watch.since, peers, watch.thread)


def group_states(runtime: Runtime) -> tuple[GroupState, ...]:
    """Return the groups that have done anything, without those that run parts of another one's operations."""
    by_name = {each.comm.group.key: each for each in _coordinators(runtime)}
    groups = (group for group in groups_by_key(runtime).values() if not group.part_of and group.size > 1)
    states = (_group_state(group) if group.key not in by_name else _set_state(by_name[group.key]) for group in groups)
    return tuple(sorted((state for state in states if state.operations), key=lambda state: state.key))


def _group_state(group: Any) -> GroupState:
    progress, calls = group.progress, group.call_number
    begun, queued = progress.unfinished()
    texts = list(progress.flight)[-LAST:]
    states: list[State] = ["ended"] * len(texts)
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
    """Return that of a group in which operations have names. The calls in which its ranks agree are not its user's."""
    group, comm = coordinator.comm.group, coordinator.comm
    done = [
        Operation(verb, text, 0, -1, "ended" if ended else "running") for verb, text, ended in coordinator.launched()
    ]
    waiting = [Operation(text.partition(" ")[0], text, 0, -1, "queued") for _, text, _ in coordinator.waiting()]
    ranks, operations = ranges_of(group.ranks), tuple([*done, *waiting][-LAST:])
    failure = "" if group.failure is None else f"{type(group.failure).__name__}: {group.failure}"
    return GroupState(group.key, comm.name, ranks, group.call_number, operations, failure)


def _operation(text: str, sequence: int, state: State) -> Operation:
    return Operation(text.replace(",", " ").partition(" ")[0], text, sequence, nbytes_of(text), state)


def nbytes_of(text: str) -> int:
    """Return the bytes of this rank's array in a call, by its text; -1 if that does not tell."""
    found = _SIZES.search(text)
    if found is None or found[3] not in NUMPY:
        return -1
    count = 1
    for length in (found[1] or found[2]).replace(",", " ").split():
        count *= int(length)
    return count * NUMPY[found[3]].itemsize


def named(runtime: Runtime) -> tuple[Named, ...]:
    """Return the operations that go by name and have not run yet."""
    now = time.monotonic()
    return tuple(
        Named(comm.name, name, text, ranges_of(comm.group.ranks), now - since)
        for comm, name, text, since in _by_name(runtime)
    )


def _by_name(runtime: Runtime) -> list[tuple[Any, str, str, float]]:
    """Return a communicator, a name, a text and since when, for each."""
    return [(each.comm, *waiting) for each in _coordinators(runtime) for waiting in each.waiting()]


def _coordinators(runtime: Runtime) -> list[Any]:
    services = runtime.services
    return [] if services is None else _listed(services.coordinators)
