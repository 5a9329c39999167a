"""Process sets: groups of ranks that run named operations of their own, each with a coordinator of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import commlib
from commlib.coordinator import Coordinator, Request
from commlib.errors import UsageError
from commlib.observe.timeline import Timeline

if TYPE_CHECKING:
    from commlib.communicator import Communicator


class ProcessSet:
    """Some ranks. It has operations of its own once it is registered, by `init` or `add_process_set`.

    Made of ranks of the world, or of an mpi4py communicator over them. Registered sets have a `process_set_id`.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.ranks: list[int] | None = None
            self.mpi_comm: Any = ranks_or_comm
        else:
            self.mpi_comm = None
            numbers = [int(rank) for rank in ranks_or_comm]
            self.ranks = sorted(numbers)
            if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
                raise UsageError(f"ProcessSet: ranks {numbers} must be different and not negative")
        self.process_set_id: int | None = None
        self._coordinator: Coordinator | None = None
        self._communicator: Any = None

    def size(self) -> int | None:
        """Return the number of ranks, or None while it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's place among the ranks of the set, or None while it is not registered.

        Raises UsageError where this process is not one of them.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if not self.included():
            raise UsageError(f"{self}: rank {running().rank} is not in it")
        return self.ranks.index(running().rank)

    def included(self) -> bool | None:
        """Return whether this process is one of the ranks, or None while it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else running().rank in self.ranks

    def coordinator(self, verb: str) -> Coordinator:
        """Return what runs the operations of this set. Raises UsageError unless this process is in it."""
        if self._coordinator is None:
            if self.process_set_id is None:
                raise UsageError(f"{verb}: {self} is not registered: call add_process_set, or give it to init")
            raise UsageError(f"{verb}: rank {running().rank} is not in {self}: only its ranks may call this")
        return self._coordinator

    def communicator(self, verb: str) -> Any:
        """Return a Communicator of the ranks of the set, for collectives in a fixed order; of all ranks the world.

        Collective over those ranks when first called. Raises UsageError on other ranks.
        """
        coordinator = self.coordinator(verb)
        if self.process_set_id == 0:
            return running()
        if self._communicator is None:
            # Made from the group of the operations by name, so in turn with them.
            request = Request("process_set", "communicator", repeats=False)
            split = coordinator.submit(request, extra=lambda comm: comm.split(0), blocking=True)
            self._communicator = split.wait()
        return self._communicator

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """Return the set itself: it stands for ranks, and a copy of what refers to it means the same ones."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the ranks; what comes of it is not registered."""
        return ProcessSet, (self.ranks or [],)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return self is other or (self.ranks == other.ranks and self.process_set_id == other.process_set_id)

    def __hash__(self) -> int:
        return id(self)


class Registry:
    """The process sets of one world. All ranks have the same ones, because adding and removing is agreed on."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.sets: dict[int, ProcessSet] = {}
        self.timeline: Timeline | None = None
        self._register(global_process_set, list(range(world.size)), world.split(0))

    def add(self, process_set: ProcessSet) -> None:
        """Register a set. Collective over all ranks. Raises UsageError if its ranks are registered already."""
        if process_set.process_set_id is not None:
            raise UsageError(f"add_process_set: {process_set} is registered already")
        ranks = process_set.ranks
        if ranks is None:
            ranks = _ranks_of(process_set.mpi_comm, self.world)
        elif ranks and ranks[-1] >= self.world.size:
            raise UsageError(f"add_process_set: ranks {ranks}, but there are the ranks 0 to {self.world.size - 1}")
        if not ranks:
            raise UsageError("add_process_set: a process set needs at least one rank")
        for other in self.sets.values():
            if other.ranks == ranks:
                raise UsageError(f"add_process_set: {other} has these ranks already")
        group = self._agreed("add_process_set", ranks, lambda comm: comm.split(0 if self.world.rank in ranks else -1))
        self._register(process_set, ranks, group)

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set once its operations are done; return False if it is not registered, or all ranks.

        Collective over all ranks.
        """
        number = process_set.process_set_id
        if number is None or number == 0 or self.sets.get(number) is not process_set:
            return False
        assert process_set.ranks is not None
        coordinator = process_set._coordinator
        if coordinator is not None:
            coordinator.drain(threading.TIMEOUT_MAX)

        def close(comm: Any) -> None:
            if coordinator is not None:
                coordinator.close_group()

        self._agreed("remove_process_set", process_set.ranks, close)
        self.forget(process_set)
        return True

    def forget(self, process_set: ProcessSet) -> None:
        """Make a set what it was before it was registered."""
        assert process_set.process_set_id is not None
        del self.sets[process_set.process_set_id]
        process_set.process_set_id, process_set._coordinator, process_set._communicator = None, None, None
        if process_set is global_process_set:
            process_set.ranks = None

    def close(self) -> str:
        """End all operations; what has not run ends with ShutdownError.

        Returns the first failure that nobody has asked for, or "".
        """
        self.stop_timeline()
        failures = [coordinator.unseen_failure() for coordinator in self.coordinators()]
        for coordinator in self.coordinators():
            coordinator.close()
        for process_set in list(self.sets.values()):
            self.forget(process_set)
        return next(filter(None, failures), "")

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or what is after `timeout` s."""
        return next(filter(None, [each.drain(timeout) for each in self.coordinators()]), "")

    def coordinators(self) -> list[Coordinator]:
        """Return those of the sets that this process is in."""
        found = [process_set._coordinator for process_set in self.sets.values()]
        return [coordinator for coordinator in found if coordinator is not None]

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Trace the operations of all sets, on rank 0."""
        if self.timeline is not None:
            raise UsageError("start_timeline: a timeline is being written already: call stop_timeline first")
        if self.world.rank == 0:
            self.timeline = Timeline(path, rank=0, mark_cycles=mark_cycles)
            self._share_timeline()

    def stop_timeline(self) -> None:
        """Finish the trace, if there is one."""
        timeline, self.timeline = self.timeline, None
        self._share_timeline()
        if timeline is not None:
            timeline.close()

    def _share_timeline(self) -> None:
        for coordinator in self.coordinators():
            coordinator.timeline = self.timeline

    def _agreed(self, what: str, ranks: Sequence[int], run: Any) -> Any:
        """Run something in turn with the operations of all ranks, once all have asked for it for these ranks."""
        request = Request("process_set", what, (), (("ranks", str(list(ranks))),), repeats=False)
        return global_process_set.coordinator(what).submit(request, extra=run, blocking=True).wait()

    def _register(self, process_set: ProcessSet, ranks: list[int], group: Any) -> None:
        number = next(number for number in range(len(self.sets) + 1) if number not in self.sets)
        process_set.ranks, process_set.process_set_id = ranks, number
        self.sets[number] = process_set
        if group is not None:
            group.name = f"process set {number}"
            process_set._coordinator = Coordinator(group, ranks)
            process_set._coordinator.timeline = self.timeline
            process_set.mpi_comm = group.native


global_process_set = ProcessSet([])
global_process_set.ranks = None
"""All ranks."""


def running() -> Communicator:
    """Return the Communicator of all ranks. Raises UsageError (a ValueError) before `init` and after `shutdown`."""
    if not commlib.is_initialized():
        raise UsageError("commlib is not initialised: call hvd.init() first (hvd: commlib_torch or commlib_tensorflow)")
    return commlib.world()


def registry() -> Registry:
    """Return the process sets of the world; made, collectively, when first asked for. Raises as `running` does."""
    world = running()
    if world.runtime.named is None:
        world.runtime.named = Registry(world)
    found: Registry = world.runtime.named
    return found


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or one made of these ranks, and return it. Collective over all ranks.

    Raises UsageError (a ValueError) if its ranks are registered already, or are none of the world's.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    registry().add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return False if it is not registered or the global one. Collective over all ranks."""
    return registry().remove(process_set)


def process_set_of(process_set: Any = None) -> ProcessSet:
    """Return the set that an argument `process_set` means: None is that of all ranks.

    Raises UsageError for something else.
    """
    if process_set is None or process_set is global_process_set:
        registry()
        return global_process_set
    if isinstance(process_set, ProcessSet):
        return process_set
    raise UsageError(f"process_set is a {type(process_set).__name__}: expected a ProcessSet, or None for all ranks")


def coordinator_of(process_set: ProcessSet | None, verb: str) -> Coordinator:
    """Return what runs the operations of a set, None being all ranks. Raises UsageError as `process_set_of` does."""
    if process_set is None:
        process_set = global_process_set
    found = process_set._coordinator if isinstance(process_set, ProcessSet) else None
    return process_set_of(process_set).coordinator(verb) if found is None else found


def _ranks_of(comm: Any, world: Any) -> list[int]:
    """Return the ranks in the world of the ranks of an mpi4py communicator."""
    if world.native is None:
        raise UsageError("add_process_set: an MPI communicator was given, but there is no MPI here")
    group = comm.Get_group()
    return sorted(group.Translate_ranks(list(range(group.Get_size())), world.native.Get_group()))
