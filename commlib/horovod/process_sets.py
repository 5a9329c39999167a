"""Process sets: let groups of ranks run named operations of their own, each by a coordinator of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import commlib
from commlib.coordinator import Coordinator, Request
from commlib.errors import MismatchError, UsageError
from commlib.horovod.memberships import Ranks, all_sets, who_differs

if TYPE_CHECKING:
    from commlib.communicator import Communicator


class ProcessSet:
    """Group some ranks. It has operations of its own once it is registered, by `init` or `add_process_set`.

    Made of ranks of the world, or of an mpi4py communicator over them, `mpi_comm`. Registered sets have a
    `process_set_id`; several objects may be given to `init` that stand for one set.
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
        self._first: ProcessSet | None = None  # what was registered with these ranks before this
        self.is_implied = False
        """Registered by something else than the user, who may add and remove a set of these ranks all the same."""

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
        if self._first is not None:
            return self._first.communicator(verb)
        if self._communicator is None:
            # Made from the group of the operations by name, so in turn with them.
            request = Request("process_set", "communicator", repeats=False)
            split = coordinator.submit(request, extra=lambda comm: comm.split(0), blocking=True)
            self._communicator = split.wait()
        return self._communicator

    def forget(self) -> None:
        """Become what it was before it was registered."""
        self.process_set_id = self._coordinator = self._communicator = self._first = None

    @property
    def is_nothing(self) -> bool:
        """Made of no communicator: that of a rank that a split left out."""
        return self.mpi_comm is not None and not self.mpi_comm

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
    """Keep the process sets of one world. All ranks have the same, because adding and removing is agreed on."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.sets: dict[int, ProcessSet] = {}
        self._others: dict[int, list[ProcessSet]] = {}
        """Objects beside those in `sets` that stand for the same ones."""
        self._register(global_process_set, tuple(range(world.size)), world.split(0))

    def add(self, process_set: ProcessSet) -> None:
        """Register a set. Collective over all ranks. Raises UsageError if its ranks are registered already."""
        if process_set.process_set_id is not None:
            raise UsageError(f"add_process_set: {process_set} is registered already")
        ranks = self._ranks_of(process_set, "add_process_set")
        known = self._find(ranks)
        if known is not None and (users := [each for each in self._alike(known) if not each.is_implied]):
            raise UsageError(f"add_process_set: {users[0]} has these ranks already")
        make = None if known else ranks
        group = self._agreed("add_process_set", list(ranks), lambda comm: make and _split(comm, make))
        if known is None:
            self._register(process_set, ranks, group)
        else:
            self._stand_for(process_set, known)

    def add_missing(self, process_sets: Sequence[ProcessSet], what: str, *, distinct: bool = False) -> None:
        """Register sets, or let them stand for those that are registered with their ranks: all of them, or none.

        Collective. Ranks must give the same sets, but of those made of communicators each only its own. distinct: no
        two of them have the same ranks, and none has all, as the global one has. Raises UsageError for ranks that are
        none of the world's, or not distinct, MismatchError on every rank where ranks differ.
        """
        given: list[tuple[Ranks, ProcessSet]] = []
        refused = ""
        try:
            # Where a split left this rank out, there is no communicator.
            given = [(self._ranks_of(each, what), each) for each in process_sets if not each.is_nothing]
        except UsageError as error:
            refused = str(error)
        twice = self._duplicate([members for members, _ in given], what) if distinct else ""
        mine = refused, twice, [(members, each.mpi_comm is not None) for members, each in given]

        def run(comm: Any) -> Any:
            refusals, duplicates, everyone = zip(*comm.all_gather_object(mine), strict=True)
            refusal = next(filter(None, refusals), "")
            wrong = "" if refusal else who_differs(everyone)
            refusal = refusal or ("" if wrong else twice or next(filter(None, duplicates), ""))
            wrong = wrong or refusal
            new = [] if wrong else [each for each in dict.fromkeys(all_sets(everyone)) if self._find(each) is None]
            return refusal, wrong, [(each, _split(comm, each)) for each in new]

        refusal, wrong, groups = self._agreed(what, "", run)
        if refusal:
            raise UsageError(refused or refusal)
        if wrong:
            raise MismatchError(f"{what}: {wrong} (this is rank {self.world.rank} of {self.world.size})")
        unnumbered = [(members, each) for members, each in given if each.process_set_id is None]
        own = dict(reversed(unnumbered))  # of equal ones the first
        for members, group in groups:
            self._register(own.get(members) or ProcessSet(members), members, group)
        for members, process_set in unnumbered:
            known = self._find(members)
            if known is not None and known is not process_set:
                self._stand_for(process_set, known)

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set once its operations are done; return False if it is not registered, or all ranks.

        Collective over all ranks.
        """
        first = process_set._first
        if first is not None and first.is_implied:
            self._agreed("remove_process_set", process_set.ranks, lambda comm: None)
            assert first.process_set_id is not None
            others = self._others[first.process_set_id]
            self._others[first.process_set_id] = [each for each in others if each is not process_set]
            process_set.forget()
            return True
        process_set = first or process_set
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
        """Make a set what it was before it was registered, and whatever stands for it."""
        assert process_set.process_set_id is not None
        del self.sets[process_set.process_set_id]
        for each in (process_set, *self._others.pop(process_set.process_set_id, ())):
            each.forget()
        if process_set is global_process_set:
            process_set.ranks = process_set.mpi_comm = None

    def close(self) -> str:
        """End all operations; what has not run ends with ShutdownError.

        Returns the first failure that was never asked for, or "".
        """
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

    def _agreed(self, what: str, ranks: Any, run: Any) -> Any:
        """Run something in turn with the operations of all ranks, once all have asked for it for these ranks."""
        request = Request("process_set", what, (), (("ranks", str(ranks)),), repeats=False)
        return global_process_set.coordinator(what).submit(request, extra=run, blocking=True).wait()

    def _ranks_of(self, process_set: ProcessSet, what: str) -> Ranks:
        """Return the ranks of a set that is not registered. Raises UsageError unless they are some of the world's."""
        size = self.world.size
        if process_set.ranks is None:
            ranks = _ranks_of(process_set.mpi_comm, self.world) if process_set.mpi_comm else ()
        else:
            ranks = tuple(process_set.ranks)
        if not ranks:
            raise UsageError(f"{what}: a process set needs at least one rank")
        if ranks[-1] >= size or ranks[0] < 0:
            raise UsageError(f"{what}: ranks {list(ranks)}, but there are the ranks 0 to {size - 1}")
        return ranks

    def _duplicate(self, given: Sequence[Ranks], what: str) -> str:
        """Return in words which ranks another set of these has, too, or the global one; "" if there are none."""
        for ranks in given:
            if len(ranks) == self.world.size:
                return f"{what}: the ranks {list(ranks)} are all there are: that is the global process set"
            if given.count(ranks) > 1:
                return f"{what}: the ranks {list(ranks)} are given twice: one process set has them"
        return ""

    def _find(self, ranks: Ranks) -> ProcessSet | None:
        return next((known for known in self.sets.values() if tuple(known.ranks or ()) == ranks), None)

    def _alike(self, known: ProcessSet) -> list[ProcessSet]:
        """Return a set that is registered, and whatever stands for it."""
        assert known.process_set_id is not None
        return [known, *self._others.get(known.process_set_id, ())]

    def _stand_for(self, process_set: ProcessSet, known: ProcessSet) -> None:
        assert known.process_set_id is not None
        process_set.ranks, process_set.process_set_id = known.ranks, known.process_set_id
        process_set._coordinator, process_set._first = known._coordinator, known
        self._others.setdefault(known.process_set_id, []).append(process_set)

    def _register(self, process_set: ProcessSet, ranks: Ranks, group: Any) -> None:
        number = next(number for number in range(len(self.sets) + 1) if number not in self.sets)
        process_set.ranks, process_set.process_set_id = list(ranks), number
        self.sets[number] = process_set
        if group is not None:
            group.name = f"process set {number}"
            process_set._coordinator = Coordinator(group, ranks)


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
    if world.runtime.services is None:
        world.runtime.services = Registry(world)
    found: Registry = world.runtime.services
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


def _split(comm: Any, members: Ranks) -> Any:
    """Return a group of these ranks on each of them, else None. Collective over all."""
    return comm.split(0 if comm.rank in members else -1)


def _ranks_of(comm: Any, world: Any) -> Ranks:
    """Return the ranks in the world of the ranks of an mpi4py communicator; negative where one is not in it."""
    if world.native is None:
        raise UsageError("ProcessSet: an MPI communicator was given, but there is no MPI here")
    group = comm.Get_group()
    return tuple(sorted(group.Translate_ranks(list(range(group.Get_size())), world.native.Get_group())))
