"""Process sets: let groups of ranks run separate named operations, each set with its own coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import commlib
from commlib.arguments import describe_type
from commlib.coordinator import Coordinator, OpRequest
from commlib.errors import MismatchError, UsageError
from commlib.horovod.memberships import Members, all_sets, find_difference

if TYPE_CHECKING:
    from commlib.communicator import Communicator


def _numbers(ranks: Iterable[int]) -> list[int]:
    """Return ranks as integers. Raises UsageError."""
    try:
        return [index(rank) for rank in ranks]
    except TypeError:
        raise UsageError(
            f"ProcessSet: expected global ranks such as [0, 1], or an mpi4py communicator, got {ranks!r}"
        ) from None


class ProcessSet:
    """A group of ranks. It can run operations once it is registered, by `init` or `add_process_set`.

    It is made from ranks of the world, or from an mpi4py communicator over them, `mpi_comm`. Registered sets have a
    `process_set_id`; several objects passed to `init` may be aliases of one set.

    Args:
        ranks_or_comm: Global ranks, or an mpi4py communicator over them.

    Raises:
        UsageError: For ranks that are no integers, negative, or not different.

    Examples:
        >>> group = ct.add_process_set(ct.ProcessSet([0, 1])) if ct.size() > 2 else ct.global_process_set
        >>> group.size()
        2
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.ranks: list[int] | None = None
            self.mpi_comm: Any = ranks_or_comm
        else:
            self.mpi_comm = None
            numbers = _numbers(ranks_or_comm)
            self.ranks = sorted(numbers)
            if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
                raise UsageError(f"ProcessSet: ranks {numbers} must be different and not negative")
        self.process_set_id: int | None = None
        self._coordinator: Coordinator | None = None
        self._communicator: Any = None
        self._first: ProcessSet | None = None  # the set registered earlier with these ranks
        self.is_implied = False
        """Registered by commlib, not by the user, who may still add and remove a set of these ranks."""

    def size(self) -> int | None:
        """Return the number of ranks, or None if the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank within the set, or None if the set is not registered.

        Raises UsageError if this process is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if not self.included():
            raise UsageError(f"{self}: rank {require_world().rank} is not in it")
        return self.ranks.index(require_world().rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set, or None if the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else require_world().rank in self.ranks

    def is_alone(self, verb: str) -> bool:
        """Return whether this process reduces nothing over the set: it is outside, or the only rank.

        Raises UsageError if the set is not registered.
        """
        if self.process_set_id is None:
            self.coordinator(verb)  # raises
        return self._coordinator is None or len(self.ranks or ()) == 1

    def coordinator(self, verb: str) -> Coordinator:
        """Return the coordinator of this set's operations. Raises UsageError unless this process is in the set."""
        if self._coordinator is None:
            if self.process_set_id is None:
                raise UsageError(f"{verb}: {self} is not registered: call add_process_set, or pass it to init")
            raise UsageError(f"{verb}: rank {require_world().rank} is not in {self}: only its ranks may call this")
        return self._coordinator

    def communicator(self, verb: str) -> Communicator:
        """Return a Communicator of the set's ranks, for collectives in program order; for all ranks, the world.

        The first call is collective over those ranks. Raises UsageError on other ranks.
        """
        if self is global_process_set or self.process_set_id == 0:
            return require_world()
        coordinator = self.coordinator(verb)
        if self._first is not None:
            return self._first.communicator(verb)
        if self._communicator is None:
            # Split from the group of the operations by name, so in order with them.
            request = OpRequest("process_set", "communicator", repeats=False)
            split = coordinator.submit(request, extra=lambda comm: comm.split(0), blocking=True)
            self._communicator = split.wait()
        result: Communicator = self._communicator
        return result

    def forget(self) -> None:
        """Return to the unregistered state."""
        self.process_set_id = self._coordinator = self._communicator = self._first = None

    @property
    def is_nothing(self) -> bool:
        """Made from a null communicator, as a split returns on ranks that it leaves out."""
        return self.mpi_comm is not None and not self.mpi_comm

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """Return the set itself: it names ranks, and copies of objects that refer to it mean the same ranks."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the ranks; the unpickled set is not registered."""
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
    """The process sets of one world. All ranks have the same sets, because adding and removing is collective."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.sets: dict[int, ProcessSet] = {}
        self._others: dict[int, list[ProcessSet]] = {}
        """Aliases of the objects in `sets`."""
        self._register(global_process_set, tuple(range(world.size)), world.split(0))

    def add(self, process_set: ProcessSet) -> None:
        """Register a set. Collective over all ranks. Raises UsageError if its ranks are already registered."""
        if process_set.process_set_id is not None:
            raise UsageError(f"add_process_set: {process_set} is already registered")
        ranks = self._ranks_of(process_set, "add_process_set")
        known = self._find(ranks)
        if known is not None and (users := [each for each in self._alike(known) if not each.is_implied]):
            raise UsageError(f"add_process_set: {users[0]} already has these ranks")
        make = None if known else ranks
        group = self._agreed("add_process_set", list(ranks), lambda comm: make and _split(comm, make))
        if known is None:
            self._register(process_set, ranks, group)
        else:
            self._make_alias(process_set, known)

    def add_missing(self, process_sets: Sequence[ProcessSet], what: str, *, distinct: bool = False) -> None:
        """Register sets, or make them aliases of registered sets with the same ranks: all of them, or none.

        Collective. Ranks must pass the same sets; of sets made from communicators, each rank passes only its own.
        distinct: no two sets have the same ranks, and none has all, which the global set has. Raises UsageError for
        ranks outside the world, or sets that are not distinct; MismatchError on every rank if ranks differ.
        """
        given: list[tuple[Members, ProcessSet]] = []
        refused = ""
        try:
            for each in process_sets:
                if not isinstance(each, ProcessSet):
                    raise UsageError(f"{what}: expected a ProcessSet, got {describe_type(each)}")
            # A rank that a split left out has no communicator.
            given = [(self._ranks_of(each, what), each) for each in process_sets if not each.is_nothing]
        except UsageError as error:
            refused = str(error)
        twice = self._duplicate([members for members, _ in given], what) if distinct else ""
        mine = refused, twice, [(members, each.mpi_comm is not None) for members, each in given]

        def run(comm: Any) -> Any:
            refusals, duplicates, everyone = zip(*comm.all_gather_object(mine), strict=True)
            refusal = next(filter(None, refusals), "")
            wrong = "" if refusal else find_difference(everyone)
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
        own = dict(reversed(unnumbered))  # of equal sets the first
        for members, group in groups:
            self._register(own.get(members) or ProcessSet(members), members, group)
        for members, process_set in unnumbered:
            known = self._find(members)
            if known is not None and known is not process_set:
                self._make_alias(process_set, known)

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set once its operations are done; return False if it is not registered or is the global set.

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
        """Return a set and its aliases to the unregistered state."""
        assert process_set.process_set_id is not None
        del self.sets[process_set.process_set_id]
        for each in (process_set, *self._others.pop(process_set.process_set_id, ())):
            each.forget()
        if process_set is global_process_set:
            process_set.ranks = process_set.mpi_comm = None

    def close(self) -> str:
        """End all operations; pending ones end with ShutdownError.

        Returns the first failure that no caller has seen, or "".
        """
        failures = [coordinator.unseen_failure() for coordinator in self.coordinators()]
        for coordinator in self.coordinators():
            coordinator.close()
        for process_set in list(self.sets.values()):
            self.forget(process_set)
        return next(filter(None, failures), "")

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or the operations still pending after `timeout` s."""
        return next(filter(None, [each.drain(timeout) for each in self.coordinators()]), "")

    def coordinators(self) -> list[Coordinator]:
        """Return the coordinators of the sets that include this process."""
        coordinators = [process_set._coordinator for process_set in self.sets.values()]
        return [coordinator for coordinator in coordinators if coordinator is not None]

    def _agreed(self, what: str, ranks: Any, run: Any) -> Any:
        """Run a function in order with the operations of all ranks, once all have requested it for these ranks."""
        request = OpRequest("process_set", what, (), (("ranks", str(ranks)),), repeats=False)
        return global_process_set.coordinator(what).submit(request, extra=run, blocking=True).wait()

    def _ranks_of(self, process_set: ProcessSet, what: str) -> Members:
        """Return the ranks of an unregistered set. Raises UsageError unless they are ranks of the world."""
        size = self.world.size
        if process_set.ranks is None:
            ranks = _ranks_of(process_set.mpi_comm, self.world) if process_set.mpi_comm else ()
        else:
            ranks = tuple(process_set.ranks)
        if not ranks:
            raise UsageError(f"{what}: a process set needs at least one rank")
        if ranks[-1] >= size or ranks[0] < 0:
            raise UsageError(f"{what}: ranks {list(ranks)}: expected ranks from 0 to {size - 1}")
        return ranks

    def _duplicate(self, given: Sequence[Members], what: str) -> str:
        """Return an error text for ranks that are given twice or are all ranks; "" if there are none."""
        for ranks in given:
            if len(ranks) == self.world.size:
                return f"{what}: the ranks {list(ranks)} are all ranks: they already are the global process set"
            if given.count(ranks) > 1:
                return f"{what}: the ranks {list(ranks)} are given twice: pass one process set for them"
        return ""

    def _find(self, ranks: Members) -> ProcessSet | None:
        return next((known for known in self.sets.values() if tuple(known.ranks or ()) == ranks), None)

    def _alike(self, known: ProcessSet) -> list[ProcessSet]:
        """Return a registered set and its aliases."""
        assert known.process_set_id is not None
        return [known, *self._others.get(known.process_set_id, ())]

    def _make_alias(self, process_set: ProcessSet, known: ProcessSet) -> None:
        assert known.process_set_id is not None
        process_set.ranks, process_set.process_set_id = known.ranks, known.process_set_id
        process_set._coordinator, process_set._first = known._coordinator, known
        self._others.setdefault(known.process_set_id, []).append(process_set)

    def _register(self, process_set: ProcessSet, ranks: Members, group: Any) -> None:
        number = next(number for number in range(len(self.sets) + 1) if number not in self.sets)
        process_set.ranks, process_set.process_set_id = list(ranks), number
        self.sets[number] = process_set
        if group is not None:
            group.name = f"process set {number}"
            process_set._coordinator = Coordinator(group, ranks)


global_process_set = ProcessSet([])
global_process_set.ranks = None
"""All ranks."""


def require_world() -> Communicator:
    """Return the Communicator of all ranks. Raises UsageError (a ValueError) before `init` and after `shutdown`."""
    try:
        return commlib.world()
    except UsageError:
        message = "commlib is not initialised: call hvd.init() first (hvd: commlib_torch or commlib_tensorflow)"
        raise UsageError(message) from None


def registry() -> Registry:
    """Return the process sets of the world; the first call is collective. Raises as `require_world` does."""
    world = require_world()
    if world.runtime.services is None:
        world.runtime.services = Registry(world)
    result: Registry = world.runtime.services
    return result


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or a new one of these ranks, and return it. Collective over all ranks.

    Args:
        process_set: A set that is not registered, or global ranks.

    Raises:
        UsageError: If its ranks are already registered, or are not ranks of the world; also a ValueError.

    Examples:
        >>> alone = ct.add_process_set([0])
        >>> alone.included() == (comm.rank == 0)
        True
        >>> ct.remove_process_set(alone)
        True
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    registry().add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return False if it is not registered or is the global set. Collective over all ranks.

    Args:
        process_set: A registered set.

    Examples:
        >>> ct.remove_process_set(ct.add_process_set([1]))
        True
    """
    return registry().remove(process_set)


def process_set_of(process_set: Any = None) -> ProcessSet:
    """Return the set of an argument `process_set`: None means all ranks.

    Raises UsageError for any other type.
    """
    if process_set is None or process_set is global_process_set:
        registry()
        return global_process_set
    if isinstance(process_set, ProcessSet):
        return process_set
    raise UsageError(f"process_set is a {type(process_set).__name__}: expected a ProcessSet, or None for all ranks")


def coordinator_of(process_set: ProcessSet | None, verb: str) -> Coordinator:
    """Return the coordinator of a set; None means all ranks. Raises UsageError as `process_set_of` does."""
    if process_set is None:
        process_set = global_process_set
    coordinator = process_set._coordinator if isinstance(process_set, ProcessSet) else None
    return process_set_of(process_set).coordinator(verb) if coordinator is None else coordinator


def _split(comm: Any, members: Members) -> Any:
    """Return a group of these ranks on its members, else None. Collective over all ranks."""
    return comm.split(0 if comm.rank in members else -1)


def _ranks_of(comm: Any, world: Any) -> Members:
    """Return the world ranks of an mpi4py communicator's ranks; negative for a rank outside the world."""
    if world.native is None:
        raise UsageError("ProcessSet: an MPI communicator was given, but commlib runs without MPI")
    group = comm.Get_group()
    return tuple(sorted(group.Translate_ranks(list(range(group.Get_size())), world.native.Get_group())))
