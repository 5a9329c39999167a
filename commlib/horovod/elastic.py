"""Elastic: commit and restore state in memory, in a loop that restarts when an operation fails.

The ranks of a job do not change so far: joining and leaving hosts, as in Horovod's elastic jobs, is not supported.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import commlib
from commlib.collectives.host.objects import all_gather_object
from commlib.coordinator import PendingOp
from commlib.data_parallel.reducer import abandon_all
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, TransportError, UsageError
from commlib.horovod.exceptions import HostsUpdatedInterrupt
from commlib.horovod.keepers import Keeper, SamplerKeeper
from commlib.horovod.operations import broadcast_object
from commlib.horovod.process_sets import process_set_of, registry

log = logging.getLogger("commlib")

FINAL = (PeerError, ShutdownError, TransportError, UsageError)
"""Errors after which the ranks cannot synchronise again, or the next call would fail likewise. After any other error
they synchronise and restart, as after a HorovodInternalError that the program raises."""

TOGETHER = """All ranks must be in the same call of elastic.run, with the same attempts. A rank that has returned from
it cannot restart: if its end may fail, end it with an operation that all ranks wait for, such as a barrier."""

BETWEEN_PASSES = (
    "elastic: state.commit() between the passes that accumulate gradients for one update. Accumulated gradients are "
    "local to each rank, and are lost after a failure. Commit after an update"
)


class State:
    """The state that a training loop needs to resume. Subclasses define `save`, `restore` and `sync`.

    `bcast_object` and `get_rank` are Horovod's arguments.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self.commits = 0
        """The number of commits."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register callbacks for restarts of training after a failure, for example to set the learning rate again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset this state and call the registered callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Handle a change of hosts. commlib does not call it so far."""

    def commit(self) -> None:
        """Save this state, to restore it when an operation fails."""
        if self.between_passes():
            warnings.warn(BETWEEN_PASSES, stacklevel=2)
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check for changed hosts. They never change so far."""

    def reset(self) -> None:
        """Prepare for a restart of training."""

    def between_passes(self) -> bool:
        """Return whether gradients have accumulated that no update has used."""
        return False

    def save(self) -> None:
        """Save a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it. Collective."""
        raise NotImplementedError


class ObjectState(State):
    """Holds attributes of any picklable type: `ObjectState(epoch=0, batch=0)`; then `state.epoch` and so on.

    Subclasses override `keeper_of` to support other objects, such as models. `bcast_object` gives all ranks rank 0's
    value; `get_rank` is Horovod's, and unused.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._keepers: dict[str, Keeper] = {}
        super().__init__()
        self._bcast_object = bcast_object
        plain: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
            if (keeper := self.keeper_of(value)) is None:
                plain[name] = value
            else:
                self._keepers[name] = keeper
        self._saved: dict[str, Any] = copy.deepcopy(plain)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the attributes of the constructor

    def keeper_of(self, value: Any) -> Keeper | None:
        """Return a keeper for the state of `value`, or None for a picklable value."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If it has a keeper, the keeper changes to the new object, from its present state on."""
        keepers = self.__dict__.get("_keepers", {})
        if name in keepers:
            keeper = self.keeper_of(value)
            if keeper is None:
                raise TypeError(f"{name} is a {type(value).__name__}: expected an object whose state can be saved")
            keepers[name] = keeper
        super().__setattr__(name, value)

    def save(self) -> None:
        """Save copies of everything, or of nothing if a rank abandons the save. Collective if there are samplers."""
        # Samplers first, because they synchronise: if another rank does not arrive, nothing is saved yet.
        for keeper in sorted(self._keepers.values(), key=lambda keeper: not isinstance(keeper, SamplerKeeper)):
            keeper.save()
        self._saved = copy.deepcopy({name: getattr(self, name) for name in self._saved})

    def restore(self) -> None:
        """Restore the copies."""
        for keeper in self._keepers.values():
            keeper.restore()
        self._put_back()

    def sync(self) -> None:
        """Take everything from rank 0, and save copies. Collective."""
        for keeper in self._keepers.values():
            keeper.sync()
        if self._saved:
            self._saved = self._bcast_object({name: getattr(self, name) for name in self._saved})
            self._put_back()

    def reset(self) -> None:
        """Prepare the kept objects for a restart: samplers shard their remaining indices again."""
        for keeper in self._keepers.values():
            keeper.reset()

    def _put_back(self) -> None:
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)


def run(func: Callable[..., Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Decorate `func(state, ...)`: before it runs, the ranks take the state of rank 0.

    All ranks go back to their last commit and call `func` again if an operation fails and the ranks stay in step
    (MismatchError, StallError of one operation), or if the program raises a HorovodInternalError, on one rank or on
    several. They do so at most `attempts` times from one commit of rank 0. A HostsUpdatedInterrupt calls `func` again
    without restoring the state, if no rank has failed. Other errors, such as the death of a rank, end the run.

        @elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()
    """
    return run_fn(func, _keep_ranks, attempts=attempts)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Return `func(state, ...)` that restarts as `run` does; each restart calls `reset()`, then `state.on_reset`.

    The ranks synchronise before `state.sync`. If only some of them raise, the ranks that wait for them get a
    MismatchError and restart, too: in operations by name, of every process set that includes a raising rank, and in
    calls in program order, such as reductions of PyTorch's gradients. `state.restore` and `reset` run on all ranks,
    when all have arrived. Ranks that skip the sync (`HostsUpdatedInterrupt(skip_sync=True)`) do not synchronise: all
    ranks must then skip it.

    Raises UsageError on all ranks if they synchronise from different elastic functions, or with different `attempts`.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        barrier = _RestartBarrier(attempts)
        error: CommlibError | HostsUpdatedInterrupt | None = None  # the reason of this rank's restart
        while True:
            is_returning = error is not None
            syncs = not (isinstance(error, HostsUpdatedInterrupt) and error.skip_sync)
            failed = syncs and barrier.hold(error, state.commits)
            error = None  # its traceback keeps the objects of the call alive
            try:
                if failed:
                    state.restore()
                if is_returning:
                    reset()
                    state.on_reset()
                if syncs:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                error = interrupt
            except CommlibError as failure:
                if isinstance(failure, FINAL):
                    raise
                error = failure

    return wrapper


class _RankStatus(NamedTuple):
    """The state of one rank at the rendezvous."""

    what: str
    is_returning: bool
    failed: bool
    commits: int
    calls: int


class _RestartBarrier:
    """The rendezvous of all ranks before they take the state of rank 0; it interrupts ranks that wait elsewhere."""

    calls: ClassVar[int] = 0
    """The number of elastic functions that this rank has called."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        # Ranks in consecutive elastic functions must not continue together.
        _RestartBarrier.calls += 1
        self._what = f"elastic function number {_RestartBarrier.calls}, {attempts} attempts"
        self._failures, self._commits = 0, 0  # since the last commit of rank 0
        self._restarts: list[PendingOp] = []  # in flight: one per coordinator, after this rank has restarted

    def hold(self, error: CommlibError | HostsUpdatedInterrupt | None, commits: int) -> bool:
        """Wait for all ranks, and return whether any has failed. Collective. Raises `error` after too many attempts.

        If a rank restarts, operations in flight on the others are abandoned.
        """
        mine = _RankStatus(self._what, error is not None, isinstance(error, CommlibError), commits, self.calls)
        ranks = self._gather(mine) if commlib.is_initialized() else [mine]
        if any(rank.what != self._what for rank in ranks):
            _RestartBarrier.calls = max(rank.calls for rank in ranks)  # their next calls match again
            places = "".join(f"\n  rank {number}: {rank.what}" for number, rank in enumerate(ranks))
            raise UsageError(f"elastic.run: ranks are in different elastic functions:{places}\n{TOGETHER}")
        if ranks[0].commits > self._commits:
            self._failures, self._commits = 0, ranks[0].commits
        by = [number for number, rank in enumerate(ranks) if rank.failed]
        if not by:
            return False
        self._failures += 1
        if self._failures >= self._attempts:
            if isinstance(error, CommlibError):
                raise error
            raise MismatchError(f"elastic.run: ranks {by} have failed, {self._failures} times since the last commit")
        why = error if mine.failed else f"ranks {by} have failed"
        log.warning(
            "elastic: restart from the last commit (attempt %d of %d): %s", self._failures + 1, self._attempts, why
        )
        return True

    def _gather(self, mine: _RankStatus) -> list[_RankStatus]:
        if mine.is_returning:
            self._restart()
        group = process_set_of(None).communicator("elastic.run").group
        while True:
            try:
                # In program order, because others may wait for this rank in such a call. The name distinguishes it.
                ranks: list[_RankStatus] = group.run(all_gather_object(group, mine, "barrier of elastic.run"))
            except MismatchError as other:
                if not mine.is_returning or group.failure is not None:
                    raise
                log.debug("elastic: another rank has been notified that this one restarts: %s", other)
            except BaseException:
                for restart in self._restarts:
                    restart.seen = True  # its failure would have the same cause
                raise
            else:
                break
        if any(rank.is_returning for rank in ranks):
            self._restart()
            restarts, self._restarts = self._restarts, []
            for restart in restarts:
                restart.wait()
            abandon_all()
        return ranks

    def _restart(self) -> None:
        if not self._restarts:
            self._restarts = [coordinator.restart() for coordinator in registry().coordinators()]


def _keep_ranks() -> None:
    """Do nothing: the ranks of a job do not change."""
